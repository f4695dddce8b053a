"""A trained checkpoint as lm_eval's model: Megatron-core computes the logits on the ranks of a tensor parallel group.

It is lm_eval's own class for transformers with another forward pass. So requests are tokenised, truncated, batched and
scored exactly as those of the released model, and the two differ by the computation alone. Every rank runs the same
tasks in the same order, as if it were alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor
from torch.nn.functional import pad

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError

Logits = Callable[[Tensor], Tensor]
"""Logits [batch, sequence, vocabulary] in fp32 of token ids [batch, sequence]."""


class MegatronLM(HFLM):
    """lm_eval's model whose logits are computed by a function."""

    def __init__(self, compute: Logits, hf_folder: Path, device: torch.device, **settings: Any) -> None:
        """`settings` are those of HFLM: batch_size, max_length."""
        from transformers import AutoConfig, AutoTokenizer

        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        config = AutoConfig.from_pretrained(hf_folder, **options).get_text_config()
        model = _Model(compute, device, config, str(hf_folder))
        super().__init__(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(hf_folder, **options), **settings)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        """Greedy continuations [batch, up to max_length] of left-padded contexts [batch, sequence].

        Each step computes all positions again: there is no cache of keys and values.
        """
        if settings.get("do_sample") or settings.get("temperature"):
            raise RequestError(
                "the task samples its answers",
                needed="a task that decodes greedily, or a Hugging Face folder",
                action="convert the checkpoint first: tools/convert_checkpoint.py",
                where="--tasks",
            )
        mask, tokens = settings["attention_mask"].bool(), context
        is_stopped = stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0])
        done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        while tokens.shape[1] < max_length and not done.all():
            chosen = _last_logits(self.model.compute, tokens, mask).argmax(-1)
            chosen = torch.where(done, self.tokenizer.pad_token_id, chosen)
            tokens, mask = torch.cat([tokens, chosen[:, None]], dim=1), pad(mask, (0, 1), value=True)
            done |= (chosen == self.eot_token_id) | is_stopped(tokens, None).to(done.device)
        return tokens

    def get_model_info(self) -> dict[str, Any]:
        """Nothing: the hub doesn't know a checkpoint."""
        return {}


@dataclass(frozen=True)
class _Model:
    """What HFLM needs of a model of transformers."""

    compute: Logits
    device: torch.device
    config: Any
    name_or_path: str

    def __call__(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.compute(tokens))


def _last_logits(compute: Logits, tokens: Tensor, mask: Tensor) -> Tensor:
    """The logits [batch, vocabulary] after the last token; padding is moved from the left to the right of each row,
    where causal attention doesn't see it, and positions count from 0."""
    lengths = mask.sum(1)
    places = torch.arange(tokens.shape[1], device=tokens.device) + (tokens.shape[1] - lengths)[:, None]
    rows = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))
    return compute(rows)[torch.arange(len(rows), device=rows.device), lengths - 1]


def compute_logits(model: Any, shape: ModelShape, size: int) -> Logits:
    """The logits of a Megatron-core model on the ranks of its tensor parallel group, in step."""
    from pretrainkit.megatron import model as megatron_model

    def compute(tokens: Tensor) -> Tensor:
        padded = pad(tokens, (0, -tokens.shape[1] % size))  # experts under TP need a multiple of it
        return megatron_model.logits(model, padded, vocab_size=shape.vocab_size)[:, : tokens.shape[1]]

    return compute


def join_ranks(rank: int, size: int, meeting: str, *, on_gpu: bool) -> Any:
    """Connect this rank; gives `pretrainkit.megatron.model`, imported for its device."""
    os.environ["LOCAL_RANK"] = str(rank)  # only of the first one does lm_eval take results
    if not on_gpu:
        from pretrainkit.megatron.preloaded_cpu import megatron_model

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
        torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=size)
    else:
        sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
        from pretrainkit.imports import heavy_imports

        with heavy_imports():
            from pretrainkit.megatron import model as megatron_model
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group("nccl", meeting, rank=rank, world_size=size)
    megatron_model.initialize(tensor_parallel_size=size)
    return megatron_model
