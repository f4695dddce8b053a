"""What the engine uses of NeMo, imported after the patches that NeMo's import needs. Nothing else imports NeMo."""

from __future__ import annotations

from pretrainkit.megatron import patches

patches.apply(patches.NEMO_IMPORT)

from nemo import lightning  # noqa: E402
from nemo.collections import llm  # noqa: E402
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer  # noqa: E402
from nemo.lightning.io.artifact import DirOrStringArtifact, FileArtifact  # noqa: E402
from nemo.lightning.io.mixin import track_io  # noqa: E402
from nemo.lightning.megatron_parallel import MaskedTokenLossReduction  # noqa: E402
from nemo.utils import logging  # noqa: E402
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizerCallback  # noqa: E402

if not hasattr(AutoTokenizer, "__io_artifacts__"):
    # Without it a checkpoint's context names the tokenizer's folder in place of a copy. NeMo's registry leaves it out
    # where transformers has no LlamaTokenizerFast in a module of its own, as since version 5.
    track_io(
        AutoTokenizer,
        artifacts=[
            FileArtifact("vocab_file", required=False),
            FileArtifact("merges_file", required=False),
            DirOrStringArtifact("pretrained_model_name", required=False),
        ],
    )

__all__ = ["AsyncFinalizerCallback", "AutoTokenizer", "MaskedTokenLossReduction", "lightning", "llm", "logging"]
