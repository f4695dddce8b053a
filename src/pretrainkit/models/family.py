"""What a model family is: how its Hugging Face config is read, and its weights as a table.

The table names both sides, so it serves both directions of a conversion. Megatron names are those that
megatron-core's Transformer Engine layer spec gives (norm weights inside `linear_qkv` and `linear_fc1`),
which its distributed checkpoints use for every layer implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pretrainkit.config.schema import ModelShape

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""What Hugging Face's layer_types calls layers: without and with a sliding window, and with linear attention."""


class Layout(Enum):
    """How the Hugging Face tensors of one row form one Megatron tensor, and how tensor parallelism splits it."""

    REPLICATED = "replicated"
    """Same tensor, replicated on every tensor-parallel rank."""
    COLUMN = "column"
    """Same tensor, split along dimension 0."""
    ROW = "row"
    """Same tensor, split along dimension 1."""
    VOCABULARY = "vocabulary"
    """Same tensor with padding rows at the end, split along dimension 0."""
    QKV = "qkv"
    """query, key, value: per query group its query heads, its key head, its value head; split along dimension 0."""
    GATED = "gated"
    """gate and up concatenated along dimension 0; a rank has its part of gate, then its part of up."""


@dataclass(frozen=True)
class Weight:
    """One row of a family's table. `{layer}` and `{expert}` in the names make a row repeat."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the Hugging Face tensors, in the order of `hf`."""
    is_fused: bool = False
    """Hugging Face's first tensor has the parts of these shapes one after another (Phi-3's qkv_proj), but for the last
    ones, if there are further tensors (Qwen3.5's in_proj_qkv and in_proj_z)."""
    num_stacked: int = 0
    """Hugging Face has one tensor for so many experts, [experts, out, in] or for biases [experts, out], with up after
    gate; 0: each expert has its own."""
    is_alternating: bool = False
    """Of such a tensor: the rows of gate and up alternate (gpt-oss)."""
    is_transposed: bool = False
    """Of such a tensor: it is [experts, in, out]."""
    is_scalar: bool = False
    """Hugging Face's tensor has no dimension, Megatron's has one element."""
    layers: tuple[int, ...] | None = None
    """The layers that have it; None: all."""
    groups: int = 1
    """Of QKV: into how many the rows of each tensor are divided; those of a group come one after another."""
    keep_dtype: bool = False
    """Never cast: a router bias in fp32 chooses other experts when it is rounded."""

    @property
    def num_fused(self) -> int:
        """Parts in Hugging Face's first tensor."""
        return len(self.shapes) - len(self.hf) + 1 if self.is_fused else 1

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.megatron

    def is_in(self, layer: int | None) -> bool:
        """Whether a layer has it; None stands for what is outside of layers."""
        return self.layers is None or layer in self.layers

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.hf[0] or self.num_stacked > 0


@dataclass(frozen=True)
class ConfigFields:
    """The fields of config.json that a family knows, in addition to those that every decoder shares.

    A field that is in none of these lists is refused by name, because it may change what the model computes.
    """

    read: frozenset[str] = frozenset()
    """Fields that the family turns into a ModelShape."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields that are supported at these values only; a field may be absent."""
    ignored: frozenset[str] = frozenset()
    """Fields that don't affect pretraining (limits, losses of other tasks)."""

    def __or__(self, other: ConfigFields) -> ConfigFields:
        """The fields of both; at fields that both fix, the values of `other`."""
        return ConfigFields(self.read | other.read, {**self.fixed, **other.fixed}, self.ignored | other.ignored)


def names(text: str) -> frozenset[str]:
    """The names of fields in a text."""
    return frozenset(text.split())


@dataclass(frozen=True)
class NemoClasses:
    """NeMo's classes for a family, each as `module:name`."""

    model: str
    config: str
    scaled_rope_config: str = ""
    """The config class whose model scales rotary frequencies as Llama 3 does; empty when NeMo has none."""
    context_length_field: str = "seq_length"
    """The field of the config class that NeMo's exporter writes as max_position_embeddings."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config class whose defaults must be overridden, beyond those that a shape determines."""


@dataclass(frozen=True)
class Family:
    """A model family; one module of this package defines one."""

    name: str
    architectures: tuple[str, ...]
    """Values of `architectures` in config.json."""
    fields: ConfigFields
    defaults: Mapping[str, Any]
    """What the family's config class in transformers takes for a field that config.json leaves out."""
    shape: Callable[[Mapping[str, Any]], ModelShape]
    """Reads what `hf_config.read_fields` makes of a checked config.json: every field of `defaults` is there."""
    weights: Callable[[ModelShape], tuple[Weight, ...]]
    """The table for a shape, in the order of the Hugging Face model."""
    layer_types: tuple[str, ...] = (FULL,)
    """What layer_types may say of layers."""
    old_layer_types: Mapping[str, str] = field(default_factory=dict)
    """Names in layer_types that transformers 4 calls otherwise; 5 reads these, too."""
    has_layer_types: bool = False
    """Whether layer_types may give layers a sliding window."""
    rope_types: tuple[str, ...] = ("default", "dynamic", "linear", "llama3", "yarn")
    """Rotary scalings that its class in transformers computes."""
    rope_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its scalings that others don't have, with values of their type."""
    local_rope: str = ""
    """Layers with a window have their own rotary base: the field of transformers 4 that states it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Fields of config.json that transformers 5 calls otherwise, with the names that `shape` reads."""
    nemo: NemoClasses | None = None
    """NeMo's classes, for training and for the context of a NeMo checkpoint; None when NeMo has none."""
