"""Which implementation each part of a layer gets: what is installed, what fits the run, what was asked for.

| part | default | fused | why |
|---|---|---|---|
| norm | torch's | triton | the residual gradient needs no kernel launch of its own |
| rotary | Megatron's torch code | triton | one launch per layer instead of about twenty |
| swiglu | Megatron's torch code | liger | gate and product in one pass, only the input is saved |
| cross_entropy | Megatron's | triton | no fp32 copy of the logits |
| weight_gradient | added after the GEMM | gemm | the GEMM accumulates into the fp32 buffer |
| tp_comm_overlap | NCCL before or after a GEMM | copies | copy engines fetch one chunk while another is multiplied |
| cuda_graphs | eager | graphs | short kernels don't wait for the host |

Transformer Engine's layers have their own norm, rotary embedding and communication. tp_comm_overlap is for
tensor-parallel ranks with sequence parallelism; NCCL is kept where chunks are small (MIN_CHUNK_TOKENS) or GPUs have no
access to each other's memory. cuda_graphs is for one GPU per model replica without recomputation, up to
MAX_GRAPHED_WORK.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from pretrainkit.config.layer_features import LLAMA, LayerFeatures
from pretrainkit.config.schema import Kernels, ResolvedRun
from pretrainkit.config.training import FUSED_KERNELS, kernel_names
from pretrainkit.errors import RequestError
from pretrainkit.models.flops import layer_parameters

PLAIN = "torch"
LIBRARIES = ("transformer_engine", "triton", "liger_kernel")
_FUSED = {
    "norm": "triton",
    "rotary": "triton",
    "swiglu": "liger",
    "cross_entropy": "triton",
    "weight_gradient": "gemm",
    "tp_comm_overlap": "copies",
    "cuda_graphs": "graphs",
}
_BF16_ONLY = ("cross_entropy", "weight_gradient")
"""In fp32 Megatron's own cross entropy and accumulation of weight gradients are exact and used."""
_NEEDS = {"liger": ("liger_kernel", "triton"), "triton": ("triton",), "gemm": (), "copies": (), "graphs": ()}
MIN_CHUNK_TOKENS = 8192
"""Tokens of one rank's chunk from which tp_comm_overlap is used. On two H200 the 1B shape trained 6% faster than with
NCCL with chunks of 8,192 tokens; the 8B shape trained 5% slower with chunks of 2,048."""

_FOR_GRAPHS = "torch's layers, TP, PP and CP of 1, no experts, no recomputation, no attention within documents"
MAX_GRAPHED_WORK, MAX_GRAPHED_WORK_IN_FP8 = 0.7e12, 1.1e12
"""Parameters of a layer x tokens of a microbatch up to which graphs are used; beyond it the GPU doesn't wait anyway."""


def installed_libraries() -> frozenset[str]:
    """Those of LIBRARIES that this Python can import."""
    return frozenset(name for name in LIBRARIES if importlib.util.find_spec(name))


def choose_for(run: ResolvedRun, installed: frozenset[str]) -> Kernels:
    """The kernels of `run` where these LIBRARIES are installed; see `choose`."""
    parallel, training = run.config.parallel, run.config.training
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    tokens = training.micro_batch_size * run.config.data.sequence_length
    # All microbatches must be the same work on one GPU, one after another.
    is_whole = parallel.model_parallel_size == 1 and run.recompute.granularity == "none"
    # A graph replays the sizes of its capture: those of experts change.
    features = run.model.features
    can_be_graphed = is_whole and not run.reset_attention_mask and not run.model.num_experts and features == LLAMA
    overlaps = run.sequence_parallel and run.config.launch.num_gpus % parallel.tensor_model_parallel_size == 0
    return choose(
        # Only our layers have attention within documents, FP8, and some families' features.
        layer_spec="torch"
        if run.reset_attention_mask or run.fp8 or run.model.needs_our_layers
        else training.layer_spec,
        fused_kernels=training.fused_kernels,
        accelerator=run.accelerator,
        precision=run.precision,
        installed=installed,
        chunk_tokens=tokens // ranks if overlaps and not run.fp8 and features == LLAMA else 0,
        layer_work=layer_parameters(run.model) * tokens if can_be_graphed else 0,
        fp8=run.fp8 is not None,
        features=features,
    )


def _unfused(features: LayerFeatures) -> Iterator[str]:
    """The parts that the fused kernels don't compute as a model with these features has them."""
    if features.zero_centered_norm or not features.norm_before:
        yield "norm"
    # Megatron has no way to leave the fused rotation out of some layers, or to give them other angles.
    is_everywhere = not features.nope_layers and not features.local_rope_theta and not features.latent_attention
    if features.rotary_fraction != 1 or features.rotary_interleaved or not is_everywhere:
        yield "rotary"
    if features.activation != "silu" or features.mlp_bias:
        yield "swiglu"


def choose(
    *,
    layer_spec: str,
    fused_kernels: str,
    accelerator: str,
    precision: str,
    installed: frozenset[str],
    chunk_tokens: int = 0,
    layer_work: float = 0,
    fp8: bool = False,
    features: LayerFeatures = LLAMA,
) -> Kernels:
    """The kernels of a run where these LIBRARIES are installed.

    `layer_spec` is auto, te or torch; `fused_kernels` is auto, off, or a comma-separated list of FUSED_KERNELS.
    `chunk_tokens` is the size of the chunks of a layer's input that ranks of one node gather, 0 if there are none;
    `layer_work` is parameters of a layer x tokens of a microbatch, 0 if graphs can't be used. `fp8`: the layers'
    products are in FP8. `features` are the model's: some parts of its layers may have no fused kernel.
    Raises RequestError when something that was asked for by name can't be used.
    """
    fusable, unfused = accelerator == "gpu", set(_unfused(features))
    unused = {
        *unfused,
        *(("tp_comm_overlap",) if chunk_tokens < MIN_CHUNK_TOKENS else ()),
        *(("cuda_graphs",) if layer_work > (MAX_GRAPHED_WORK_IN_FP8 if fp8 else MAX_GRAPHED_WORK) else ()),
    }
    faster = tuple(part for part in FUSED_KERNELS if part not in unused)
    asked = {"auto": faster, "off": ()}.get(fused_kernels, kernel_names(fused_kernels))
    fused = tuple(
        part
        for part in asked
        if fusable
        and part not in unfused
        and installed.issuperset(_NEEDS[_FUSED[part]])
        and (precision == "bf16" or part not in _BF16_ONLY)
        and (chunk_tokens or part != "tp_comm_overlap")
        and (part != "cuda_graphs" or (layer_work and layer_spec != "te"))
    )
    missing = [part for part in asked if fused_kernels != "auto" and part not in fused]
    if missing:
        packages = " and ".join(sorted({name for part in missing for name in _NEEDS[_FUSED[part]]}))
        raise RequestError(
            f"fused {', '.join(missing)} can't be used on this machine ({accelerator}, {precision})",
            needed=f"a GPU, {packages or 'torch with CUDA'}"
            + (", bf16" if set(missing) & set(_BF16_ONLY) else "")
            + (", sequence parallelism within nodes" if "tp_comm_overlap" in missing else "")
            + (f", {_FOR_GRAPHS}" if "cuda_graphs" in missing else "")
            + (f", a model without {features.names()}" if unfused & set(missing) else ""),
            action="install what is missing, or leave it out: --fused_kernels auto uses what is available",
            where="--fused_kernels",
        )
    if layer_spec == "te" and "transformer_engine" not in installed:
        raise RequestError(
            "transformer_engine is not installed",
            needed="--layer_spec auto or torch, or the package",
            where="--layer_spec te",
        )
    if layer_spec == "auto":
        # Our layers are faster than Transformer Engine's with all kernels, but not without, with long microbatches.
        wanted = {"norm", "rotary", "swiglu", "cross_entropy"} - (set() if precision == "bf16" else set(_BF16_ONLY))
        ours_is_faster = wanted.issubset(fused)
        layer_spec = "te" if "transformer_engine" in installed and fusable and not ours_is_faster else "torch"
    choice = {part: _FUSED[part] if part in fused else PLAIN for part in FUSED_KERNELS}
    if layer_spec == "te":
        choice |= {"norm": "te", "rotary": "te", "tp_comm_overlap": "te", "cuda_graphs": PLAIN}
    return Kernels(layer_spec=layer_spec, **choice)


def config_fields(kernels: Kernels, *, qk_norm: bool) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig that enable these kernels."""
    fused_rotary = kernels.rotary == "triton"
    return {
        "apply_rope_fusion": kernels.rotary != PLAIN,
        # Norms of queries and keys come between the projection and the rotation.
        "fused_single_qkv_rope": fused_rotary and not qk_norm,
        "bias_activation_fusion": kernels.swiglu == "liger",
        # Without biases and dropout only a sum is left; a compiled call takes longer on the host than that on the GPU.
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": kernels.weight_gradient != PLAIN,
    }
