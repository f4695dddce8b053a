"""What the layers of a model family have beyond those of Llama, Qwen and Mixtral.

Our layers (`pretrainkit.megatron`) compute all of it, NeMo's classes and Megatron-LM's arguments none: such models are
trained by `pretrainkit.engine.gpt_config`, and only Hugging Face's and NeMo's formats are written for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pretrainkit.records import decode


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434): keys and values of all heads come from one small vector."""

    kv_lora_rank: int
    """Size of that vector."""
    qk_rope_head_dim: int
    """Dimensions at the end of each query and key that are rotated; those of keys are the same for all heads."""
    v_head_dim: int
    """Of each head's value; queries and keys have ModelShape.head_dim."""
    q_lora_rank: int = 0
    """Size of the vector that queries come from; 0: they come from the hidden state."""
    norm_eps: float = 1e-6
    """Of the norms of these vectors."""


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net: linear attention with a state of each value head (arXiv:2412.06464)."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads: each has as many after one another."""
    key_head_dim: int
    """Of queries, too."""
    value_head_dim: int
    kernel_size: int
    """Tokens of the convolution of queries, keys and values."""


@dataclass(frozen=True)
class GlobalAttention:
    """Attention of the layers that aren't local, where their heads are not those of the local ones."""

    head_dim: int
    num_query_groups: int
    rotary_fraction: float
    """Part of the frequencies of a head, from the highest, that turn; the others are 0."""
    keys_are_values: bool = False
    """Values are the projected keys, before their norm: there is no projection of values."""


@dataclass(frozen=True)
class Routing:
    """How a router chooses a token's experts where it isn't by the largest logits alone."""

    score_function: str = "softmax"
    """Of logits: softmax, or sigmoid, which is then divided by the sum over the chosen experts."""
    expert_bias: bool = False
    """Scores get a bias of each expert when experts are chosen, which training moves towards even loads
    (arXiv:2408.15664); the weights of the chosen don't."""
    scaling_factor: float = 1.0
    """Of the weights of the chosen experts."""
    num_groups: int = 1
    """Groups of experts of equal size; only experts of `topk_groups` groups can be chosen."""
    topk_groups: int = 1
    experts_per_group_score: int = 1
    """Largest scores of a group whose sum is the group's."""
    scales_input: bool = False
    """The weight of a chosen expert multiplies its input, not its output."""
    aux_loss_by_sequence: bool = False
    """The auxiliary loss is that of each sequence alone."""


@dataclass(frozen=True)
class LayerFeatures:
    """The defaults are those of a layer of Llama; layers are numbered from 0."""

    activation: str = "silu"
    """Of the MLP: silu, gelu (its tanh approximation), xielu, which has weights and no gate, or clamped_swiglu: x and y
    of gate and up become min(x, limit) x sigmoid(alpha x) x (1 + y) with y between -limit and limit."""
    swiglu_limit: float = 0.0
    """Of clamped_swiglu, as the next."""
    swiglu_alpha: float = 0.0
    norm_before: bool = True
    """RMSNorm of a block's input (attention and MLP)."""
    norm_after: bool = False
    """RMSNorm of a block's output, before it is added to the residual stream."""
    zero_centered_norm: bool = False
    """Norms multiply by 1 + weight."""
    qk_norm_over_heads: bool = False
    """The norms of queries and keys are over all heads together, not over each."""
    output_bias: bool = False
    """Bias of attention's output projection."""
    mlp_bias: bool = False
    """Biases of the MLP's or the experts' matrices."""
    router_bias: bool = False
    routing: Routing | None = None
    """None: experts are chosen by the softmax of their logits."""
    dense_layers: tuple[int, ...] = ()
    """Layers without experts in a model with experts."""
    shared_expert_gate: bool = True
    """The shared expert's output is multiplied by a sigmoid of the token."""
    latent_attention: LatentAttention | None = None
    delta_net: DeltaNet | None = None
    delta_net_layers: tuple[int, ...] = ()
    """Layers with a gated delta net in the place of attention."""
    output_gate: bool = False
    """Attention's output is multiplied by a sigmoid of each query head's gate."""
    global_attention: GlobalAttention | None = None
    """Of the layers that aren't in `local_layers`; None: as that of those."""
    value_norm: bool = False
    """RMSNorm, without a weight, of each value head."""
    layer_scalar: bool = False
    """A layer's output is multiplied by a number, which training leaves as it is."""
    attention_sinks: bool = False
    """Each head has a weight that is one more score in its softmax, of no token."""
    local_layers: tuple[int, ...] = ()
    """Layers with a window, chunks or their own rotary base."""
    sliding_window: int = 0
    """Tokens that a token attends to in `local_layers`, itself included; 0: all before it."""
    attention_chunk: int = 0
    """Tokens of the chunks into which a sequence is divided in `local_layers`: a token attends to its own; 0: none."""
    local_rope_theta: float = 0.0
    """Rotary base of `local_layers`, without scaling; 0: as in other layers."""
    nope_layers: tuple[int, ...] = ()
    """Layers without rotary embeddings."""
    rotary_fraction: float = 1.0
    """Part of a head, from its first dimension, that is rotated."""
    rotary_interleaved: bool = False
    """Neighbouring dimensions are rotated together, not those of the two halves."""
    attention_scale: float | None = None
    """Factor of attention scores; None: 1/sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Attention scores x become cap x tanh(x / cap); 0: they stay as they are."""
    logits_softcap: float = 0.0
    """The same of logits."""
    query_growth: float = 0.0
    """Queries from the n-th multiple of `query_span` tokens on are multiplied by 1 + query_growth x log(1 + n); where
    there are `nope_layers`, in these."""
    query_span: int = 0
    query_offset: int = 0
    """Tokens by which these multiples come earlier."""
    qk_l2_norm: bool = False
    """RMSNorm, without a weight, of rotated queries and keys, in the layers with rotary embeddings."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor of a block's output before it is added to the residual stream."""
    logits_divisor: float = 1.0

    @property
    def has_kinds_of_layers(self) -> bool:
        """Whether layers have different tensors."""
        return bool(self.dense_layers or self.delta_net_layers or self.global_attention)

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation != "xielu"

    def names(self, sequence_length: int | None = None) -> str:
        """The features in words; without those that only longer sequences than `sequence_length` have."""
        return ", ".join(self._names(sequence_length))

    def _names(self, sequence_length: int | None) -> Iterator[str]:
        if self.latent_attention:
            yield "multi-head latent attention"
        if self.delta_net:
            yield "gated delta nets"
        if self.output_gate:
            yield "a gate of attention's output"
        if self.global_attention:
            yield "other heads in layers without a window"
        if self.value_norm:
            yield "norms of values"
        if self.layer_scalar:
            yield "scalars of layers"
        if self.routing:
            yield f"{self.routing.score_function} routing" + (" in groups" if self.routing.num_groups > 1 else "")
            if self.routing.scales_input:
                yield "experts with scaled inputs"
        if self.dense_layers:
            yield "dense layers among those with experts"
        if not self.shared_expert_gate:
            yield "shared experts without a gate"
        if self.activation != "silu":
            yield f"{self.activation} MLPs"
        if self.attention_sinks:
            yield "attention sinks"
        if self.norm_after:
            yield "norms around blocks" if self.norm_before else "norms after blocks"
        if self.zero_centered_norm:
            yield "zero-centered norms"
        if self.qk_norm_over_heads:
            yield "query and key norms over all heads"
        if self.output_bias or self.mlp_bias or self.router_bias:
            places = {"attention's output": self.output_bias, "the MLP": self.mlp_bias, "the router": self.router_bias}
            yield "biases of " + " and ".join(name for name, has_bias in places.items() if has_bias)
        if self.sliding_window and (sequence_length is None or self.sliding_window < sequence_length):
            yield f"windows of {self.sliding_window} tokens"
        if self.attention_chunk and (sequence_length is None or self.attention_chunk < sequence_length):
            yield f"attention within chunks of {self.attention_chunk} tokens"
        if self.qk_l2_norm:
            yield "norms of rotated queries and keys"
        if self.query_growth and (sequence_length is None or self.query_span < sequence_length + self.query_offset):
            yield f"queries that grow after {self.query_span} tokens"
        if self.attention_softcap or self.logits_softcap:
            yield "soft caps of attention or logits"
        if self.local_rope_theta:
            yield "two rotary bases"
        if self.nope_layers:
            yield "layers without rotary embeddings"
        if self.rotary_fraction != 1 or self.rotary_interleaved:
            yield "partial or interleaved rotary embeddings"
        multipliers = (self.embedding_multiplier, self.residual_multiplier, self.logits_divisor)
        if self.attention_scale is not None or any(factor != 1 for factor in multipliers):
            yield "multipliers of embeddings, residuals, attention or logits"

    def to_json(self) -> str:
        """The fields that differ from Llama's; empty where none does."""
        changed = {name: value for name, value in asdict(self).items() if value != getattr(LLAMA, name)}
        return json.dumps(changed) if changed else ""

    @classmethod
    def from_json(cls, text: str) -> LayerFeatures:
        """The features that `to_json` gave a text for."""
        return decode(cls, json.loads(text) if text else {}, all_fields=False)


LLAMA = LayerFeatures()
