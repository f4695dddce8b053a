"""What is set for finding faults is reported, where it costs time."""

from __future__ import annotations

from pretrainkit.diagnosis import checks
from pretrainkit.diagnosis.checks import FINE, LOOK_AT


def test_debug_variables_that_are_off_or_do_nothing_here_are_left_out() -> None:
    variables = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "PYTHONDEVMODE": "1",
        "NCCL_DEBUG": "WARN",
    }
    assert set(checks.debug_variables(variables, on_gpu=True)) == {"CUDA_LAUNCH_BLOCKING", "PYTHONDEVMODE"}
    assert set(checks.debug_variables(variables, on_gpu=False)) == {"PYTHONDEVMODE"}
    assert [check.state for check in checks.check_environment({})] == [FINE]
    assert [check.state for check in checks.check_environment({"PYTHONDEVMODE": "1"})] == [LOOK_AT]


def test_a_shared_machine_is_told() -> None:
    machine = {"cores": 2, "used_gpus": [0], "cpu_used_by_others": 0.5}
    assert [check.state for check in checks.check_machine(machine)] == [LOOK_AT, LOOK_AT]
    assert [check.state for check in checks.check_machine({**machine, "used_gpus": []})] == [LOOK_AT]
