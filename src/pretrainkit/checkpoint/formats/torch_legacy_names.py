"""Names of Megatron tensors in classic checkpoints, which hold the `state_dict` of each rank.

They differ from the global names of the weight tables in three ways: layers and experts are numbered within
the rank; the names of experts depend on the expert module; and without Transformer Engine the norms are separate
modules. This module translates between a rank's names and the global ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

FILE_NAME = "model_optim_rng.pt"
TIED_OUTPUT = "output_layer.weight"
"""Name of the copy of a tied embedding on the last pipeline stage."""


class ExpertForm(Enum):
    """How a classic checkpoint stores the matrix of an expert."""

    SINGLE = "single"
    """A tensor per expert (TEGroupedMLP `linear_fc1.weight3`, SequentialMLP `local_experts.3.linear_fc1.weight`)."""
    GROUPED = "grouped"
    """All experts of the rank in one transposed tensor (GroupedMLP `weight1`, `weight2`)."""


@dataclass(frozen=True)
class LocalName:
    """The parts of a tensor name on a rank."""

    template: str
    """The weight table's name, with `{layer}`."""
    layer: int | None = None
    """Layer within the rank's model chunk."""
    expert: int | None = None
    """Expert within the rank; None for other tensors and for grouped experts."""
    form: ExpertForm | None = None


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_GROUPED_LINEAR = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_SEQUENTIAL = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
_GROUPED = {"mlp.experts.weight1": "linear_fc1.weight", "mlp.experts.weight2": "linear_fc2.weight"}
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms that are separate modules in the local layer implementation; before experts pre_mlp_layernorm always is."""
_IGNORED = ("_extra_state", "rotary_pos_emb.inv_freq")


def is_ignored(name: str) -> bool:
    """Whether a state is not a weight: Transformer Engine's extra states, rotary frequencies."""
    return any(part in name for part in _IGNORED)


def parse(name: str, *, has_experts: bool) -> LocalName:
    """Parse a tensor name of a rank."""
    match = _LAYER.match(name)
    if not match:
        return LocalName(name)
    layer, rest = int(match[1]), match[2]
    prefix = "decoder.layers.{layer}."
    experts = prefix + "mlp.experts.experts."
    if found := _GROUPED_LINEAR.match(rest):
        return LocalName(f"{experts}{found[1]}.weight", layer, int(found[2]), ExpertForm.SINGLE)
    if found := _SEQUENTIAL.match(rest):
        return LocalName(experts + found[2], layer, int(found[1]), ExpertForm.SINGLE)
    if rest in _GROUPED:
        return LocalName(experts + _GROUPED[rest], layer, None, ExpertForm.GROUPED)
    if rest in _NORMS and not (has_experts and rest.startswith("pre_mlp")):
        rest = _NORMS[rest]
    return LocalName(prefix + rest, layer)


def local_name(template: str, layer: int | None, expert: int | None) -> str:
    """The name on a rank, in Transformer Engine's layers, of a tensor in the weight table."""
    if layer is None:
        return template
    if expert is not None:
        head, _, matrix = template.partition("experts.experts.")
        return f"{head}experts.{matrix}{expert}".format(layer=layer)
    return template.format(layer=layer)
