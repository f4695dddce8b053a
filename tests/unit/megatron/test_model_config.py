from __future__ import annotations

import pytest
import torch

from pretrainkit.config.schema import RopeScaling
from pretrainkit.megatron.model import scaled_inverse_frequencies


@pytest.mark.parametrize(
    "scaling",
    [RopeScaling(), RopeScaling(factor=32.0), RopeScaling(4.0, 2.0, 8.0, 1024)],
    ids=["llama 3.1", "llama 3.2", "other bands"],
)
def test_scaled_frequencies_are_those_of_transformers(scaling: RopeScaling) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim, theta = 64, 500000.0
    config = LlamaConfig(
        hidden_size=8 * head_dim,
        num_attention_heads=8,
        rope_theta=theta,
        rope_scaling={
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scaled = scaled_inverse_frequencies(plain, scaling)
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)
    assert not torch.equal(scaled, plain)
