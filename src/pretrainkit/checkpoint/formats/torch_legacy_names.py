"""Names of Megatron tensors in classic checkpoints, which hold each rank's own `state_dict`.

They differ from the global names of the weight tables in three ways: layers and experts are numbered within
the rank; experts are stored by the kind of expert module; and without Transformer Engine the norms are modules
of their own. This module turns a rank's name into the global one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

FILE_NAME = "model_optim_rng.pt"
TIED_OUTPUT = "output_layer.weight"
"""Name of the copy of a tied embedding on the last pipeline stage."""


class ExpertForm(Enum):
    """How a classic checkpoint holds an expert's matrix."""

    SINGLE = "single"
    """A tensor of its own (TEGroupedMLP `linear_fc1.weight3`, SequentialMLP `local_experts.3.linear_fc1.weight`)."""
    GROUPED = "grouped"
    """All experts of the rank in one transposed tensor (GroupedMLP `weight1`, `weight2`)."""


@dataclass(frozen=True)
class LocalName:
    """A rank's tensor name, taken apart."""

    template: str
    """The weight table's name, with `{layer}`."""
    layer: int | None = None
    """Layer within the rank's model chunk."""
    expert: int | None = None
    """Expert within the rank; None for tensors that are no expert's, and for grouped ones."""
    form: ExpertForm | None = None


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_GROUPED_LINEAR = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_SEQUENTIAL = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
_GROUPED = {"mlp.experts.weight1": "linear_fc1.weight", "mlp.experts.weight2": "linear_fc2.weight"}
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms that the local layer implementation keeps apart; before experts pre_mlp_layernorm is always apart."""
_IGNORED = ("_extra_state", "rotary_pos_emb.inv_freq")


def is_ignored(name: str) -> bool:
    """Whether a state is no weight: Transformer Engine's extra states, rotary frequencies."""
    return any(part in name for part in _IGNORED)


def parse(name: str, *, has_experts: bool) -> LocalName:
    """Take a rank's tensor name apart."""
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
    """A rank's name for a tensor of the weight table, as Transformer Engine's layers have it."""
    if layer is None:
        return template
    if expert is not None:
        head, _, matrix = template.partition("experts.experts.")
        return f"{head}experts.{matrix}{expert}".format(layer=layer)
    return template.format(layer=layer)
