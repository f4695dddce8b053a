from __future__ import annotations

import dataclasses

import pytest
import torch

from pretrainkit.config.schema import RopeScaling
from pretrainkit.megatron.features import scaled_inverse_frequencies


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(),
        RopeScaling(factor=32.0),
        RopeScaling(4.0, 2.0, 8.0, 1024),
        RopeScaling(8.0, kind="linear"),
        RopeScaling(4.0, original_max_position_embeddings=32768, kind="yarn"),
        RopeScaling(16.0, original_max_position_embeddings=128, kind="yarn", beta_fast=4.0, beta_slow=2.0),
    ],
    ids=["llama 3.1", "llama 3.2", "other bands", "linear", "yarn", "other yarn"],
)
def test_scaled_frequencies_are_those_of_transformers(scaling: RopeScaling) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim, theta = 64, 500000.0
    settings = {name: value for name, value in dataclasses.asdict(scaling).items() if name != "kind"}
    config = LlamaConfig(
        hidden_size=8 * head_dim,
        num_attention_heads=8,
        max_position_embeddings=int(scaling.factor * scaling.original_max_position_embeddings),
        rope_theta=theta,
        rope_scaling={"rope_type": scaling.kind, **settings},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu")
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scaled = scaled_inverse_frequencies(plain, scaling, theta)
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)
    assert not torch.equal(scaled, plain)
