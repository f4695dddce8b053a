"""A program under diagnosis sends nothing: neither to a tracker's server nor to a model hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pretrainkit.diagnosis.observe.uploads import offline

# The endpoint is a port that nobody listens on, so that a commit which is sent fails.
PROGRAM = """
import os
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
from pretrainkit.diagnosis.observe import uploads
uploads.hold_back_commits()
import huggingface_hub
from huggingface_hub import HfApi
uploads.hold_back_commits()
uploads.hold_back_commits()
api = huggingface_hub.HfApi(token="hf_none")
print(api.upload_file(path_or_fileobj=b"x", path_in_repo="a", repo_id="someone/model"))
operations = [huggingface_hub.CommitOperationAdd("a", b"x")]
assert api.create_commit("someone/model", operations, commit_message="m", run_as_future=True).result().oid == "0"
"""


def test_nothing_is_committed_to_a_hub() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("doesn't upload") == 2
    assert "someone/model" in done.stdout


@pytest.mark.parametrize(("mode", "expected"), [("online", "offline"), (None, "offline"), ("disabled", None)])
def test_trackers_are_offline(tmp_path: Path, mode: str | None, expected: str | None) -> None:
    variables = offline({"WANDB_MODE": mode} if mode else {}, tmp_path)
    assert variables.get("WANDB_MODE") == expected
    assert variables["WANDB_DIR"] == str(tmp_path) and variables["MLFLOW_TRACKING_URI"] == tmp_path.as_uri() + "/mlflow"
