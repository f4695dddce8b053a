"""Which implementation each part of a layer gets: what is installed, what fits the run, what was asked.

| part | plain | fused | why |
|---|---|---|---|
| norm | torch's | triton | the residual stream's gradient needs no launch of its own |
| rotary | Megatron's torch code | triton | about twenty launches a layer become one |
| swiglu | Megatron's torch code | liger | gate and product in one pass, nothing saved but the input |
| cross_entropy | Megatron's | triton | no fp32 copy of the logits |
| weight_gradient | added after the product | product | the product accumulates into the fp32 buffer |
| exchange | before or after a product, by NCCL | copies | copy engines bring a part while another is multiplied |
| launches | kernel by kernel | graphs | short kernels don't wait for the host |

With Transformer Engine its layers have their own norm, rotary embedding and exchange. The exchange is that of
tensor-parallel ranks under sequence parallelism, and is left to NCCL where parts are small (LEAST_PART_TOKENS) or cards
can't reach each other's memory. Graphs serve whole models on one card with nothing recomputed, up to LARGEST_GRAPHED.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import Any

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.config.training import FUSED_KERNELS
from pretrainkit.errors import RequestError
from pretrainkit.models.flops import layer_parameters

PLAIN = "torch"
LIBRARIES = ("transformer_engine", "triton", "liger_kernel")
_FUSED = {
    "norm": "triton",
    "rotary": "triton",
    "swiglu": "liger",
    "cross_entropy": "triton",
    "weight_gradient": "product",
    "exchange": "copies",
    "launches": "graphs",
}
_BF16_ONLY = ("cross_entropy", "weight_gradient")
"""Megatron's own cross entropy serves in fp32 (`model_config`), and so does adding a product of that type."""
_NEEDS = {"liger": ("liger_kernel", "triton"), "triton": ("triton",), "product": (), "copies": (), "graphs": ()}
LEAST_PART_TOKENS = 8192
"""Tokens of one rank's part from which copies are taken. On two H200 with parts of 8,192 tokens the 1B shape trained 6%
faster than with NCCL; with parts of 2,048 the 8B shape trained 5% slower."""

_FOR_GRAPHS = "torch's layers, TP, PP and CP of 1, no recomputation, no attention within documents"
LARGEST_GRAPHED = 0.7e12
"""Parameters of a layer x tokens of a microbatch up to which graphs are taken; beyond it the host is ahead anyway."""


@dataclass(frozen=True)
class Kernels:
    """The choice for one run; every rank makes the same one."""

    layer_spec: str
    """te (Transformer Engine's layers) or torch (ours)."""
    norm: str
    rotary: str
    swiglu: str
    cross_entropy: str
    weight_gradient: str
    exchange: str
    launches: str

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {getattr(self, part)}" for part in FUSED_KERNELS)
        return f"{self.layer_spec} layers; {parts}"

    def to_json(self) -> dict[str, str]:
        """The switches, for the records."""
        return dataclasses.asdict(self)


def installed_libraries() -> frozenset[str]:
    """Those of LIBRARIES that this Python can import."""
    return frozenset(name for name in LIBRARIES if importlib.util.find_spec(name))


def choose_for(run: ResolvedRun) -> Kernels:
    """The kernels of `run` on this machine; see `choose`."""
    parallel, training = run.config.parallel, run.config.training
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    tokens = training.micro_batch_size * run.config.data.sequence_length
    exchanges = run.sequence_parallel and run.config.launch.num_gpus % parallel.tensor_model_parallel_size == 0
    return choose(
        # Attention within documents is ours alone.
        layer_spec="torch" if run.reset_attention_mask else training.layer_spec,
        fused_kernels=training.fused_kernels,
        accelerator=run.accelerator,
        precision=run.precision,
        installed=installed_libraries(),
        part_tokens=tokens // ranks if exchanges else 0,
        layer_work=layer_parameters(run.model) * tokens if _can_be_graphed(run) else 0,
    )


def _can_be_graphed(run: ResolvedRun) -> bool:
    """Whether every microbatch is the same work on one card, and the only one under way."""
    parallel = run.config.parallel
    is_whole = parallel.tensor_model_parallel_size * parallel.context_parallel_size == 1
    return (
        is_whole
        and parallel.pipeline_model_parallel_size == 1
        and run.recompute.granularity == "none"
        and not run.reset_attention_mask
    )


def choose(
    *,
    layer_spec: str,
    fused_kernels: str,
    accelerator: str,
    precision: str,
    installed: frozenset[str],
    part_tokens: int = 0,
    layer_work: float = 0,
) -> Kernels:
    """The kernels of a run on this machine.

    `layer_spec` is auto, te or torch; `fused_kernels` is auto, off, or some of FUSED_KERNELS with commas between.
    `part_tokens` is the size of the parts of a layer's input that ranks of one node exchange, 0 if they don't;
    `layer_work` the parameters of a layer x tokens of a microbatch, 0 if graphs can't serve.
    Raises RequestError when something asked for by name isn't installed.
    """
    fusable = accelerator == "gpu"
    unused = {
        *(("exchange",) if part_tokens < LEAST_PART_TOKENS else ()),
        *(("launches",) if layer_work > LARGEST_GRAPHED else ()),
    }
    faster = tuple(part for part in FUSED_KERNELS if part not in unused)
    asked = {"auto": faster, "off": ()}.get(fused_kernels, tuple(fused_kernels.split(",")))
    fused = tuple(
        part
        for part in asked
        if fusable
        and installed.issuperset(_NEEDS[_FUSED[part]])
        and (precision == "bf16" or part not in _BF16_ONLY)
        and (part_tokens or part != "exchange")
        and (part != "launches" or (layer_work and layer_spec != "te"))
    )
    missing = [part for part in asked if fused_kernels != "auto" and part not in fused]
    if missing:
        raise RequestError(
            f"fused {', '.join(missing)} can't be used on this machine ({accelerator}, {precision})",
            needed=f"a GPU, {_packages(missing)}"
            + (", bf16" if set(missing) & set(_BF16_ONLY) else "")
            + (", sequence parallelism within nodes" if "exchange" in missing else "")
            + (f", {_FOR_GRAPHS}" if "launches" in missing else ""),
            action="install what is missing, or leave it out: --fused_kernels auto takes what is there",
            where="--fused_kernels",
        )
    if layer_spec == "te" and "transformer_engine" not in installed:
        raise RequestError(
            "transformer_engine is not installed",
            needed="--layer_spec auto or torch, or the package",
            where="--layer_spec te",
        )
    if layer_spec == "auto":
        # Ours with every kernel is the faster one; plain torch layers are not, with long microbatches.
        wanted = {"norm", "rotary", "swiglu", "cross_entropy"} - (set() if precision == "bf16" else set(_BF16_ONLY))
        ours_is_faster = wanted.issubset(fused)
        layer_spec = "te" if "transformer_engine" in installed and fusable and not ours_is_faster else "torch"
    choice = {part: _FUSED[part] if part in fused else PLAIN for part in FUSED_KERNELS}
    if layer_spec == "te":
        choice |= {"norm": "te", "rotary": "te", "exchange": "te", "launches": PLAIN}
    return Kernels(layer_spec=layer_spec, **choice)


def _packages(parts: list[str]) -> str:
    names = sorted({name for part in parts for name in _NEEDS[_FUSED[part]]})
    return " and ".join(names) or "torch with CUDA"


def config_fields(kernels: Kernels, *, qk_norm: bool) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig that switch these kernels on."""
    fused_rotary = kernels.rotary == "triton"
    return {
        "apply_rope_fusion": kernels.rotary != PLAIN,
        # Norms of queries and keys stand between the projection and the rotation.
        "fused_single_qkv_rope": fused_rotary and not qk_norm,
        "bias_activation_fusion": kernels.swiglu == "liger",
        # Without biases and dropout a sum is left; a compiled call takes longer on the host than the sum on the GPU.
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": kernels.weight_gradient != PLAIN,
    }
