"""Imported once by the process that ranks are forked from."""

import os

from pretrainkit.imports import heavy_imports

# As pretrain.py's ranks have it; read when huggingface_hub is imported. NeMo asks the hub for a tokenizer that isn't a
# folder, and without a network that is retried for half a minute.
os.environ["HF_HUB_OFFLINE"] = "1"

with heavy_imports():
    from pretrainkit.megatron import cpu

    cpu.bridge()
    from pretrainkit.engine import train  # noqa: F401
