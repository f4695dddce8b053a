"""The trainer imported where Transformer Engine can't be: preloaded by bench_training.py's fork server."""

import sys

sys.modules["transformer_engine"] = None  # type: ignore[assignment]

from pretrainkit import logs  # noqa: E402

logs.configure()

from pretrainkit.training import nemo  # noqa: E402, F401
