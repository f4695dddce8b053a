"""A rank that hangs is named with its stack, and ends the run after --hang_timeout.

The ranks are small scripts with the engine's own records of progress: they meet in a collective of gloo.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pretrainkit.run.history import read_history

pytestmark = pytest.mark.integration

RANK = """
import os, signal, sys, time
from pathlib import Path
from pretrainkit.engine.progress import Progress
from pretrainkit.run.progress import FOLDER_VARIABLE
rank = int(os.environ["RANK"])
progress = Progress(rank)
progress.publish(Path(os.environ[FOLDER_VARIABLE]), Path(sys.argv[2]).parent)
import torch.distributed
torch.distributed.init_process_group("gloo")
def hang_here(step):
    if rank == 1 and step == 20:
        os.kill(os.getpid(), signal.SIGSTOP) if sys.argv[3] == "stopped" else time.sleep(600)
for step in range(1, 100):
    hang_here(step)
    torch.distributed.barrier()
    time.sleep(0.05)
    progress.step_done(step)
"""


@pytest.mark.parametrize(("mode", "state"), [("sleeps", "rank.py:"), ("stopped", "is stopped by a signal; kill -CONT")])
def test_the_rank_that_hangs_is_named_and_ends_the_run(tmp_path: Path, mode: str, state: str) -> None:
    log_dir = tmp_path / "logs" / "attempt_1"
    log_dir.mkdir(parents=True)
    training = {"hang_timeout": "00:00:14", "save_timeout": "01:00:00"}
    (log_dir / "run.json").write_text(json.dumps({"config": {"training": training}}))
    (tmp_path / "rank.py").write_text(RANK)
    words = ["--ranks", "3", "--experiment_dir", str(tmp_path), "--log_dir", str(log_dir), "--"]
    words += [str(tmp_path / "rank.py"), "--run", str(log_dir / "run.json"), mode]
    done = subprocess.run([sys.executable, "-m", "pretrainkit.launch.node", *words], timeout=120)
    assert done.returncode == 1
    outcome = json.loads((log_dir / "outcome.json").read_text())
    assert outcome["has_hung"] and "waiting for rank 1 (" in outcome["reason"] and state in outcome["reason"]
    assert "hang_here" in (log_dir / "node.log").read_text()
    (log_dir / "outcome.json").unlink()
    (found,) = read_history(tmp_path).summary["logs"]
    assert found["progress"].startswith("step 19, ") and "waiting for rank 1" in found["note"]
