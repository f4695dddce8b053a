"""What the engine uses of NeMo, imported after the patches that NeMo's import needs. Nothing else imports NeMo."""

from __future__ import annotations

from pretrainkit.megatron import patches

patches.apply(patches.NEMO_IMPORT)

from nemo import lightning  # noqa: E402
from nemo.collections import llm  # noqa: E402
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer  # noqa: E402
from nemo.utils import logging  # noqa: E402
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizerCallback  # noqa: E402

__all__ = ["AsyncFinalizerCallback", "AutoTokenizer", "lightning", "llm", "logging"]
