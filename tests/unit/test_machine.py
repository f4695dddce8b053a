"""A machine's GPUs and cores are counted without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from namespaces import in_namespace

from pretrainkit import machine

torch_free = "import sys; from pretrainkit import machine; "


def test_cores_are_those_that_this_process_may_use() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); {torch_free} print(machine.count_cpus())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


def test_gpus_are_those_that_the_driver_shows() -> None:
    code = f"{torch_free} print(machine.count_gpus(), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "0 False\n"


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_a_machine_without_use_for_gpus_has_none(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch_has_cuda", lambda: False)
    facts = machine.read_machine(accelerator)
    assert facts.num_gpus == 0 and facts.num_cpus >= 1


@pytest.mark.parametrize(
    ("mounts", "usable"),
    [
        ("mount -t tmpfs -o size=64k none /dev/shm", 64 * 2**10),
        ("mount -t tmpfs -o ro none /dev/shm", 0),
        ("mount -t tmpfs none /dev", 0),
    ],
    ids=["small", "read-only", "missing"],
)
def test_shared_memory_is_what_can_be_used(mounts: str, usable: int) -> None:
    code = f"{torch_free} print(machine.usable_shared_memory())"
    assert in_namespace(mounts, [sys.executable, "-c", code], check=True).stdout == f"{usable}\n"
