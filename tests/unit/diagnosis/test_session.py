"""A rank under diagnosis ends its program when all is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pretrainkit.diagnosis.spec import SPEED_ONLY

PROGRAM = """
import sys
from pretrainkit.diagnosis.observe.session import Session
from pretrainkit.diagnosis.spec import Spec
Session(Spec(folder=sys.argv[1], plan=sys.argv[2], source="experiment", time_checkpoint=True), None).finish()
sys.exit(3)
"""


IMPORTS = """
import sys, torch, numpy
before = {name.partition(".")[0] for name in sys.modules}
from pretrainkit.diagnosis.probes import plan
print(*{name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names)
"""


def test_a_programs_own_python_needs_no_package_of_ours() -> None:
    """A script is diagnosed in its own environment, which has torch and numpy and maybe nothing else."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.stdout.split() == ["pretrainkit"], done.stderr


def test_a_program_that_was_not_told_to_save_is_ended(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), SPEED_ONLY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "rank_0.json").read_text())["ended"]
