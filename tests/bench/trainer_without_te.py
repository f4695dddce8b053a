"""The trainer imported where Transformer Engine can't be, as train.py does for torch's layers.

bench_training.py's fork server preloads it.
"""

import sys

from pretrainkit import logs

sys.modules["transformer_engine"] = None  # type: ignore[assignment]
logs.configure()

from pretrainkit.engine import train  # noqa: E402, F401
