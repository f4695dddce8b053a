"""The benchmark's own way to make inputs and runs serves the tests too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
