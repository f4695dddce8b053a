"""The register of patches: each attribute of an upstream module or class that this project sets, and why.

Megatron-core and torch have no public setting for what these rows change. A row names the versions at which upstream's
code was read; at any other version it is refused before anything is patched, since the code around the attribute may
have changed. To support another version, read the code around each row's target there and extend `read_at`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import multiprocessing
import pkgutil
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from packaging.requirements import Requirement

from pretrainkit.config.schema import Kernels
from pretrainkit.errors import RequestError

MEGATRON = "megatron-core>=0.16.0,<=0.16.1"
NEMO = "nemo_toolkit>=2.7.0,<=2.7.3"
TORCH = "torch>=2.10.0a0,<2.14"
NUMPY = "numpy>=1.26,<3"


@dataclass(frozen=True)
class Patch:
    """One attribute of an upstream module or class, and what takes its place."""

    target: str
    """`module:attribute` or `module:Class.attribute`."""
    new: Callable[[Any], Any]
    """Gives the new value for the present one."""
    reason: str
    read_at: str = MEGATRON
    """The distribution and the versions of it at which upstream's code was read, as a requirement (PEP 508)."""
    may_be_undefined: bool = False
    """Whether upstream leaves the attribute undefined when an optional import fails; its present value is then None."""

    @property
    def owner(self) -> Any:
        """The module or class that has the attribute, imported."""
        module, _, path = self.target.partition(":")
        return pkgutil.resolve_name(f"{module}:{path.rpartition('.')[0]}")

    @property
    def name(self) -> str:
        """The attribute's own name."""
        return self.target.partition(":")[2].rpartition(".")[2]

    def problem(self) -> str:
        """Why this patch can't be applied to the installed version; empty if it can."""
        requirement = Requirement(self.read_at)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            return f"{requirement.name} is not an installed package"
        if requirement.specifier.contains(version, prereleases=True):
            return ""
        return f"{requirement.name} {version} is installed"


def value(constant: object) -> Callable[[Any], Any]:
    """A constant as a patch's new value."""
    return lambda present: constant


def ours(name: str) -> Callable[[Any], Any]:
    """The object `module:name` under pretrainkit.megatron, imported when the patch is applied."""
    return lambda present: pkgutil.resolve_name(f"pretrainkit.megatron.{name}")


def wrapped_by(name: str) -> Callable[[Any], Any]:
    """What the function `module:name` under pretrainkit.megatron gives for the present value."""
    return lambda present: pkgutil.resolve_name(f"pretrainkit.megatron.{name}")(present)


def _swiglu_by_liger(present: Any) -> Any:
    from liger_kernel.megatron import apply_liger_kernel_to_megatron
    from megatron.core.fusions import fused_bias_swiglu

    apply_liger_kernel_to_megatron(rms_norm=False, cross_entropy=False, swiglu=True)
    return fused_bias_swiglu.SwiGLUFunction


def _forked_results_queue() -> Any:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    return filesystem_async._results_queue


_DIST = "megatron.core.dist_checkpointing"
_RANDOM = "megatron.core.tensor_parallel.random"
_NO_DEVICES = (
    "layers, mappings, rotary, parameter buffers, p2p, distrib_optimizer and state_dict_saver ask for the device"
)
_NO_STREAMS = "megatron_parallel, filesystem_async and p2p order their work by CUDA streams"
_NO_GENERATOR = "layers, language_model_embedding and transformer_block fork a CUDA generator"
CPU = (
    # One function per name: torch._dynamo refuses one function under two names of torch.cuda.
    Patch("torch.cuda:Stream", ours("cpu:Stream"), _NO_STREAMS, TORCH),
    Patch("torch.cuda:Event", ours("cpu:Event"), _NO_STREAMS, TORCH),
    Patch("torch.cuda:stream", value(lambda stream: contextlib.nullcontext()), _NO_STREAMS, TORCH),
    Patch("torch.cuda:current_stream", value(lambda device=None: torch.cuda.Stream()), _NO_STREAMS, TORCH),
    Patch("torch.cuda:default_stream", value(lambda device=None: torch.cuda.Stream()), _NO_STREAMS, TORCH),
    Patch("torch.cuda:synchronize", value(lambda device=None: None), _NO_STREAMS, TORCH),
    Patch("torch.cuda:current_device", value(lambda: torch.device("cpu")), _NO_DEVICES, TORCH),
    Patch("torch.cuda:set_device", value(lambda device: None), _NO_DEVICES, TORCH),
    Patch("torch.cuda:get_rng_state", value(lambda device="cuda": torch.get_rng_state()), _NO_GENERATOR, TORCH),
    # The CPU generator's state is restored by its own name.
    Patch("torch.cuda:set_rng_state", value(lambda state, device="cuda": None), _NO_GENERATOR, TORCH),
    Patch("torch.nn:Module.cuda", value(lambda self, device=None: self), "NeMo moves the model to its device", TORCH),
    Patch(f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER", wrapped_by("cpu:rng_tracker"), _NO_GENERATOR),
    Patch(f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER_INITIALIZED", value(True), _NO_GENERATOR),
    Patch(f"{_RANDOM}:_get_cuda_rng_state", value(lambda *_, **__: torch.get_rng_state()), _NO_GENERATOR),
    Patch(f"{_RANDOM}:_set_cuda_rng_state", value(lambda state, *_, **__: torch.set_rng_state(state)), _NO_GENERATOR),
    Patch(
        f"{_DIST}.strategies.filesystem_async:_get_write_results_queue",
        value(_forked_results_queue),
        "its queue's process is spawned, which imports the main script again: 10 to 20 s a save on CPU",
    ),
)
"""Lets Megatron-core run on a machine without CUDA; see `cpu.bridge`, which applies it."""
NEMO_ON_CPU = (
    Patch(
        "nemo.lightning.io.pl:_fix_tensors_device",
        value(lambda checkpoint: checkpoint),
        "NeMo moves restored tensors to the GPU, and asserts that there is one",
        NEMO,
    ),
)
"""The same for NeMo, once it is imported."""

NEMO_IMPORT = (
    Patch(
        "overrides:override",
        lambda present: functools.partial(present, check_signature=False),
        "NeMo imports a telemetry trainer, which this decorator refuses with Lightning 2.5 and newer",
        "nv-one-logger-pytorch-lightning-integration==2.3.1",
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies:tensorstore",
        value(types.ModuleType("tensorstore")),
        "NeMo imports it for checkpoints in Zarr, which Megatron has dropped and nothing here writes",
        may_be_undefined=True,
    ),
)
"""Before NeMo is imported, which `engine.nemo` does."""
NEMO_OPTIMIZER = (
    Patch(
        "megatron.core.optimizer:get_megatron_optimizer",
        wrapped_by("optimizer:without_conditions"),
        "NeMo passes arguments for parameters without weight decay and with another rate, which Megatron has replaced",
    ),
)
_TE_OR_APEX = "without Transformer Engine and apex Megatron takes torch.optim.AdamW, whose state it can't reshard"
_SLOW_CLIPPING = "without Transformer Engine and apex Megatron waits for the GPU at each tensor"
_OPTIMIZER = "megatron.core.optimizer"
OPTIMIZER = (
    Patch(f"{_OPTIMIZER}:Adam", ours("optimizer:FusedAdamW"), _TE_OR_APEX),
    Patch(f"{_OPTIMIZER}:USING_PYTORCH_OPTIMIZER", value(False), _TE_OR_APEX),
    Patch(f"{_OPTIMIZER}.distrib_optimizer:Adam", ours("optimizer:FusedAdamW"), _TE_OR_APEX),
    Patch(f"{_OPTIMIZER}.distrib_optimizer:HAVE_APEX_OR_TE", value(True), _TE_OR_APEX),
    Patch(f"{_OPTIMIZER}.distrib_optimizer:USING_APEX_OPTIMIZER", value(True), _TE_OR_APEX),
    Patch(f"{_OPTIMIZER}.clip_grads:l2_norm_impl", ours("optimizer:multi_tensor_l2_norm"), _SLOW_CLIPPING),
    Patch(f"{_OPTIMIZER}.clip_grads:multi_tensor_scale_impl", ours("optimizer:multi_tensor_scale"), _SLOW_CLIPPING),
)
"""What Megatron would take from Transformer Engine or apex."""

OPTIMIZER_GATHER = (
    Patch(
        f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_zero",
        wrapped_by("optimizer:gathering_on_gpu"),
        "for fully_reshardable checkpoints Megatron copies the state five times on the CPU",
    ),
)

_ROPE_BY_TE = "Megatron has fused rotary embeddings by Transformer Engine alone"
_ROPE, _ATTENTION = "megatron.core.models.common.embeddings.rope_utils", "megatron.core.transformer.attention"
_BY_APEX, _LINEAR = "Megatron looks for apex's extension", "megatron.core.tensor_parallel.layers"
KERNELS = {
    ("rotary", "triton"): (
        Patch(f"{_ROPE}:fused_apply_rotary_pos_emb", ours("triton.rotary:rotate_heads"), _ROPE_BY_TE),
        Patch(f"{_ATTENTION}:HAVE_FUSED_QKV_ROPE", value(True), _ROPE_BY_TE),
        Patch(
            f"{_ATTENTION}:apply_fused_qkv_rotary_pos_emb",
            ours("triton.rotary:rotate_qkv"),
            _ROPE_BY_TE,
            may_be_undefined=True,
        ),
    ),
    ("swiglu", "liger"): (
        Patch(
            "megatron.core.fusions.fused_bias_swiglu:SwiGLUFunction",
            _swiglu_by_liger,
            "Megatron's is compiled torch code that saves more; liger-kernel's own function sets it",
        ),
    ),
    ("cross_entropy", "triton"): (
        Patch(
            "megatron.core.models.common.language_module.language_module:fused_vocab_parallel_cross_entropy",
            ours("triton.cross_entropy:vocab_parallel_cross_entropy"),
            "Megatron's fusion keeps an fp32 copy of the logits",
        ),
    ),
    ("weight_gradient", "gemm"): (
        Patch(f"{_LINEAR}:fused_weight_gradient_mlp_cuda", ours("wgrad:WgradGemm"), _BY_APEX, may_be_undefined=True),
        Patch(f"{_LINEAR}:_grad_accum_fusion_available", value(True), _BY_APEX),
        Patch(
            f"{_LINEAR}:F",
            ours("wgrad:functional"),
            "an embedding's gradient has no fused accumulation; F.embedding is all that the module takes from F",
        ),
    ),
}
"""Per part of `Kernels` and its choice."""

EXPERTS = (
    Patch(
        "megatron.core.transformer.moe.moe_utils:te_general_gemm",
        lambda present: present,
        "without Transformer Engine the router reads this name, which its failed import has left undefined",
        may_be_undefined=True,
    ),
    Patch(
        "megatron.core.transformer.moe.router:router_gating_linear",
        wrapped_by("router_logits:on_tensor_cores"),
        "it multiplies fp32 copies of bf16 tensors, which has no tensor cores",
    ),
)
INDEX_FILES = (
    Patch(
        "numpy:save",
        wrapped_by("dataset:saving_atomically"),
        "gpt_dataset saves indexes under their final names and takes any file of that name as complete",
        NUMPY,
    ),
)
REGISTER = (*CPU, *NEMO_OPTIMIZER, *OPTIMIZER, *OPTIMIZER_GATHER, *sum(KERNELS.values(), ()), *EXPERTS, *INDEX_FILES)


def for_saving(keeping: Callable[[Any], Any], finishing: Callable[[Any], Any]) -> tuple[Patch, ...]:
    """Patches of a save. `keeping` and `finishing` wrap what the first rank alone does; the latter gets the last of it,
    with the results of all writes.
    """
    alone = "the first rank alone calls it, between collectives: an error there would let the others wait forever"
    return (
        Patch(f"{_DIST}.strategies.common:TorchCommonSaveStrategy.save_common", keeping, alone),
        Patch(f"{_DIST}.strategies.filesystem_async:FileSystemWriterAsync.finish", finishing, alone),
        Patch(f"{_DIST}.serialization:save_config", keeping, alone),
        Patch(
            f"{_DIST}.strategies.filesystem_async:_write_item",
            wrapped_by("save_checksums:summing"),
            "checkpoints have no checksums that a reader could check; torch's function writes a chunk",
            TORCH,
        ),
    )


def check_versions(patches: Iterable[Patch]) -> None:
    """Raise RequestError where an installed version is not one that the patches were read at."""
    unread: dict[tuple[str, str], list[str]] = {}
    for patch in patches:
        if problem := patch.problem():
            unread.setdefault((problem, patch.read_at), []).append(patch.target)
    if unread:
        (problem, read_at), targets = next(iter(unread.items()))
        raise RequestError(
            f"{problem}, whose code {targets[0]} was not checked against"
            + (f" (nor {len(targets) - 1} more patched attributes)" if len(targets) > 1 else ""),
            needed=read_at,
            action="install the versions of constraints.txt; to support another one, read upstream's code around each "
            "target, and extend read_at of its row in pretrainkit/megatron/patches.py",
            where="patches of upstream packages",
        )


_applied: dict[str, Any] = {}
"""Per target what was set there."""


def apply(patches: Iterable[Patch]) -> None:
    """Apply patches in this process for good; those that are in place already are left alone.

    Raises RequestError, before anything is patched, at a version that one of them wasn't read at.
    """
    patches = tuple(patches)
    check_versions(patches)
    for patch in patches:
        owner = patch.owner
        present = getattr(owner, patch.name, None) if patch.may_be_undefined else getattr(owner, patch.name)
        if patch.target not in _applied or _applied[patch.target] is not present:
            _applied[patch.target] = patch.new(present)
            setattr(owner, patch.name, _applied[patch.target])


def apply_kernels(kernels: Kernels) -> None:
    """Put a run's kernels where Megatron looks for them; before the model is built."""
    apply(patch for (part, choice), rows in KERNELS.items() if getattr(kernels, part) == choice for patch in rows)


def apply_optimizer() -> None:
    """Give Megatron our optimizer where neither Transformer Engine nor apex is installed; before one is built."""
    import megatron.core.optimizer as megatron_optimizer

    apply((*NEMO_OPTIMIZER, *(OPTIMIZER if megatron_optimizer.USING_PYTORCH_OPTIMIZER else ()), *OPTIMIZER_GATHER))
