"""Requests and facts to check and resolve, without files."""

from __future__ import annotations

import pytest
from changed_config import changed

from pretrainkit.config.resolve import RunFacts
from pretrainkit.config.schema import DatasetFacts, ModelShape, RunConfig
from pretrainkit.machine import MachineFacts

LLAMA_31_8B = ModelShape(
    family="llama",
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)


@pytest.fixture
def facts() -> RunFacts:
    """Llama 3.1 8B, a dataset of a million tokens with a manifest, and a machine with 8 GPUs."""
    return RunFacts(
        machine=MachineFacts(num_gpus=8, num_cpus=64),
        experiment_dir="/experiments/llama",
        model=LLAMA_31_8B,
        hf_folder="/models/llama",
        tokenizer_sha256="aa",
        tokenizer_largest_id=128255,
        dataset=DatasetFacts(("/data/a",), (), 1_000_000, 1000, 128255, "hash"),
        split_tokens=((969_000, 30_000, 1_000),),
        dataset_tokenizers=("aa",),
    )


@pytest.fixture
def config() -> RunConfig:
    """The smallest request that is right for the facts."""
    return changed(
        RunConfig(hf_model_id="/models/llama"),
        data__dataset_path="/data",
        data__sequence_length=1024,
        training__global_batch_size=64,
    )
