"""Saving, retention and clean-up, killed thirty times at random moments: a complete checkpoint is always there."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from pretrainkit.run import checkpoints
from pretrainkit.run.folder import COMMIT_MARK

KILLS = 30
SAVER = """
import sys
from pathlib import Path
from pretrainkit.run import checkpoints as resume, retention
from pretrainkit.run.folder import checkpoint_name
checkpoints = Path(sys.argv[1])
newest = resume.newest_complete(checkpoints)
resume.quarantine_incomplete(checkpoints)
retention.remove_leftovers(checkpoints)
step = newest.step if newest else 0
print(step, flush=True)
while True:
    step += 1
    folder = checkpoints / checkpoint_name(step)
    (folder / "weights").mkdir(parents=True)
    for number in range(4):
        (folder / "weights" / f"__{number}_0.distcp").write_bytes(bytes(200_000))
    resume.commit(resume.Checkpoint(folder, step=step, consumed_samples=4 * step))
    for old in retention.expired(checkpoints, keep_last=2, keep_every=None):
        retention.remove(old)
"""


def test_a_complete_checkpoint_is_there_after_every_kill(tmp_path: Path) -> None:
    chance, newest, incomplete = random.Random(3), 0, 0
    for _ in range(KILLS):
        saver = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert saver.stdout and int(saver.stdout.readline()) == newest
        while (
            max((int(mark.parent.name[5:]) for mark in tmp_path.glob("step_????????/complete.json")), default=0)
            <= newest
        ):
            assert saver.poll() is None
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.05))
        saver.kill()
        saver.wait()
        saver.stdout.close()
        found = checkpoints.newest_complete(tmp_path)
        assert found and found.step > newest
        newest = found.step
        complete = checkpoints.all_complete(tmp_path)
        incomplete += any(not (folder / COMMIT_MARK).exists() for folder in tmp_path.glob("step_????????"))
        assert len(complete) >= min(2, newest)
    assert incomplete  # the kills did come while something was being written
