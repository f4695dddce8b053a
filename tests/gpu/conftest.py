"""The benchmark's own way to make inputs and runs serves the tests too, and so does the comparison of ranks on CPU."""

import sys
from pathlib import Path

for folder in ("bench", "support"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
