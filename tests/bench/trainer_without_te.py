"""The trainer imported where Transformer Engine can't be, as train.py does for torch's layers.

bench_training.py's fork server preloads it.
"""

from pretrainkit import logs
from pretrainkit.imports import leave_out

leave_out("transformer_engine")
logs.configure()

from pretrainkit.engine import train  # noqa: E402, F401
