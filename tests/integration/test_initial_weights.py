"""A Hugging Face folder is converted once, however many runs start with it, and whatever was killed before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pretrainkit.launch import weights

pytestmark = pytest.mark.integration
PROVIDE = """
import sys
from pathlib import Path
from pretrainkit import logs
from pretrainkit.launch import weights
from pretrainkit.models.registry import read_shape
logs.configure()
initial = weights.locate(sys.argv[1], Path(sys.argv[2]))
print(weights.provide(initial, read_shape(initial.source)))
"""


def test_starts_at_the_same_time_share_one_conversion(tmp_path: Path, make_hf_llama) -> None:  # type: ignore[no-untyped-def]
    folder = make_hf_llama()
    killed = weights.locate(str(folder), tmp_path).checkpoint
    killed.with_name(f"{killed.name}.tmp-1").mkdir(parents=True)
    command = [sys.executable, "-c", PROVIDE, str(folder), str(tmp_path)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [start.communicate(timeout=120) for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0], outputs
    (checkpoint,) = {Path(out.strip()) for out, _ in outputs}
    assert (checkpoint / "weights" / ".metadata").is_file()
    assert sum("once; later starts" in err for _, err in outputs) == 1
    assert {path.name for path in checkpoint.parent.iterdir()} == {checkpoint.name, f"{checkpoint.name}.lock"}
