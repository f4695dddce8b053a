"""NeMo's model object for a run: the class and config of its family, with this run's kernels and layers."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from nemo.collections import llm
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer

from pretrainkit.config.schema import Kernels, ResolvedRun
from pretrainkit.megatron import kernels
from pretrainkit.megatron.document_attention import with_document_bounds
from pretrainkit.megatron.layer_spec import torch_layer_spec
from pretrainkit.megatron.model_config import precision_fields, recompute_fields
from pretrainkit.models.megatron_fields import nemo_model

DataStep = Callable[..., dict[str, torch.Tensor]]
"""Takes the next microbatch from a data loader's iterator."""


def build_model(run: ResolvedRun, chosen: Kernels, *, wrap_data_step: Callable[[DataStep], DataStep]) -> llm.GPTModel:
    """NeMo's model object; it builds Megatron's modules later, on every rank that rank's part.

    `wrap_data_step` gets Megatron's data step and returns the one to use.
    """
    nemo = nemo_model(run.model)
    fields: dict[str, Any] = {
        **nemo.fields,
        **precision_fields(run.precision),
        "seq_length": run.config.data.sequence_length,
        "vocab_size": run.padded_vocab_size,
    }
    config: Any = pkgutil.resolve_name(nemo.config_class)(**fields)
    fused = kernels.config_fields(chosen, qk_norm=run.model.qk_norm)
    for name, value in {**recompute_fields(run.recompute), **fused}.items():
        setattr(config, name, value)  # Megatron's checks when constructed don't know the kernels that are installed
    if chosen.layer_spec == "torch":
        config.transformer_layer_spec = functools.partial(
            torch_layer_spec, fused_norm=chosen.norm == "triton", overlaps=chosen.tp_comm_overlap == "copies"
        )
    config.forward_step_fn = forward_step
    if run.reset_attention_mask:
        config.data_step_fn = with_document_bounds(config.data_step_fn)
    config.data_step_fn = wrap_data_step(config.data_step_fn)
    tokenizer = AutoTokenizer(run.hf_folder, use_fast=True)
    model: llm.GPTModel = pkgutil.resolve_name(nemo.model_class)(config, tokenizer=tokenizer)
    return model


def forward_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run the model over a microbatch; gives the loss of each token [batch, sequence] on the last pipeline stage.

    Attention is causal by construction; a mask, where there is one, holds the bounds of documents.
    """
    output: torch.Tensor = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=batch["labels"],
    )
    return output
