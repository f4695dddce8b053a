"""The benchmark's own way to make inputs and runs serves the tests too, and so does the comparison of ranks on CPU.

Megatron is imported before the tests import it, as the commands import it.
"""

import sys
from pathlib import Path

from pretrainkit.imports import heavy_imports

with heavy_imports():
    import megatron.core  # noqa: F401

for folder in ("bench", "support"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
