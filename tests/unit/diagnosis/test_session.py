"""What is imported into a program under diagnosis."""

from __future__ import annotations

import subprocess
import sys

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
