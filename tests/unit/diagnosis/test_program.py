"""Sources are read as they would be typed; what can't be started is refused."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import diagnosis_samples as samples
import numpy as np
import psutil
import pytest

from pretrainkit.diagnosis import measure, program
from pretrainkit.diagnosis.measure import Measured, Starter
from pretrainkit.errors import RequestError
from pretrainkit.files import wait_until


def test_a_script_may_set_variables() -> None:
    made = program.of_script("OMP_NUM_THREADS=4 A_B='x y' torchrun --nproc_per_node 2 train.py --name 'a b'")
    assert made.command == ("torchrun", "--nproc_per_node", "2", "train.py", "--name", "a b")
    assert made.start_environment() == {"OMP_NUM_THREADS": "4", "A_B": "x y"}


def test_a_python_file_is_run_by_this_python() -> None:
    assert program.of_script("train.py --x").command == (sys.executable, "train.py", "--x")


@pytest.mark.parametrize("name", ["module", "pkg:", ":f", "pkg:f()"])
def test_wrong_module_names_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"pkg\.module:function"):
        program.of_module(name)


def test_an_empty_script_is_refused() -> None:
    with pytest.raises(RequestError, match="no command"):
        program.of_script("A=1")


@pytest.mark.parametrize("flag", ["--nnodes 2", "--nnodes=2:4", "--num_machines 2", "--num-nodes=3"])
def test_ranks_on_other_nodes_are_refused(flag: str) -> None:
    with pytest.raises(RequestError, match="other nodes"):
        program.of_script(f"torchrun {flag} train.py")
    assert program.of_script("torchrun --nnodes=1:1 --num_machines 1 train.py").kind == "script"


def test_a_folder_that_is_no_experiment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"run\.json"):
        program.of_experiment(tmp_path, Path("train.py"))


@pytest.mark.parametrize("words", [["--without", "debug_variables"], ["--probes", "tf32"]], ids=lambda x: x[0])
def test_no_start_is_made_for_what_was_left_out(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONDEVMODE is set, so that the program would be started again without it."""
    rank = samples.rank_result(np.random.default_rng(0))
    rank["facts"]["variables"] = {"PYTHONDEVMODE": "1"}
    monkeypatch.setenv("PYTHONDEVMODE", "1")
    starts: list[dict[str, Any]] = []

    def measured(self: Starter, **settings: object) -> Measured:
        starts.append(settings)
        return Measured([rank], {"cores": 2, "used_gpus": [], "cpu_used_by_others": 0.0})

    monkeypatch.setattr(Starter, "measure", measured)
    command = ["--script", "train.py", "--output", str(tmp_path / "report")]
    tool = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "diagnose_speed.py"))
    assert tool["main"]([*command, *words]) == 0
    assert starts == [{"budget_s": 60.0}]
    assert tool["main"](command) == 0
    # Starts that take turns have what they need of the budget.
    settings = {"speed_only": True, "budget_s": 6.0}
    assert settings | {"unset": ("PYTHONDEVMODE",)} in starts
    assert sum(start["budget_s"] for start in starts[1:]) == 60.0


def test_ranks_in_a_session_of_their_own_are_ended_with_the_program() -> None:
    """torchrun and our own launcher start them so; a signal to the program's group doesn't reach them."""
    words = ["sh", "-c", "setsid sleep 1000 & wait"]
    process = subprocess.Popen(words, start_new_session=True)
    assert wait_until(lambda: psutil.Process(process.pid).children(), timeout_s=10)
    (rank,) = psutil.Process(process.pid).children()
    measure._end(process)
    assert wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, timeout_s=10)
