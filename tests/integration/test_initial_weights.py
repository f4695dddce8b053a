"""A Hugging Face folder is converted once, however many runs start with it at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
PROVIDE = """
import sys
from pathlib import Path
from pretrainkit import logs
from pretrainkit.launch import weights
logs.configure()
print(weights.provide(weights.locate(sys.argv[1], Path(sys.argv[2]))))
"""


def test_starts_at_the_same_time_share_one_conversion(tmp_path: Path, make_hf_llama) -> None:  # type: ignore[no-untyped-def]
    command = [sys.executable, "-c", PROVIDE, str(make_hf_llama()), str(tmp_path)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [start.communicate(timeout=120) for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0], outputs
    (checkpoint,) = {Path(out.strip()) for out, _ in outputs}
    assert (checkpoint / "weights" / ".metadata").is_file()
    assert sum("once; later starts" in err for _, err in outputs) == 1
    assert {path.name for path in checkpoint.parent.iterdir()} == {checkpoint.name, f"{checkpoint.name}.lock"}
