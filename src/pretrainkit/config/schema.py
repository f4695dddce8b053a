"""The one schema of a run: frozen dataclasses that YAML, flags and run.json all map to.

A field's unit stands in the line under it. Derived values (data-parallel size, steps of one epoch)
are not asked for: `resolve.py` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent scaling of rotary position embeddings (Hugging Face: rope_type 'llama3')."""

    factor: float = 8.0
    """How many times the context grows."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Context length before the scaling, tokens."""


@dataclass(frozen=True)
class ModelShape:
    """The architecture of a decoder-only transformer, as read from a Hugging Face config.json."""

    family: str
    """Name of the model family: the module in `pretrainkit.models` that read the config."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (grouped-query attention); equal to num_attention_heads without grouping."""
    head_dim: int
    vocab_size: int
    """Rows of the embedding in the Hugging Face checkpoint, before Megatron's padding."""
    max_position_embeddings: int
    """Longest sequence the model was made for, tokens."""
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm on each query and key head (Qwen3)."""
    num_experts: int = 0
    """Experts per layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    initializer_range: float = 0.02
