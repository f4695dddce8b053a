"""What a start adds to a resolved run: its start mode, kernels, recomputation, and estimates of memory and time.

Kernels and recomputation depend on the packages and the GPU of the machine that trains. So they are chosen once, in the
Python environment that will run the ranks: by the launcher where the ranks are its children, else by the first node of
the job or the process in the container (`choose_on_node`). Ranks read them from run.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from pretrainkit.config import resolve
from pretrainkit.config.run_file import read_run, write_run
from pretrainkit.config.schema import ParallelConfig, ResolvedRun
from pretrainkit.errors import RequestError
from pretrainkit.machine import describe_gpu
from pretrainkit.megatron.compiler import check_triton
from pretrainkit.megatron.kernels import LIBRARIES, choose_for, installed_libraries
from pretrainkit.run import resume_plan
from pretrainkit.run.estimates import cheapest_recompute, estimate, fits, gpu_memory
from pretrainkit.run.gpu_specs import GPUS, lacks_fp8
from pretrainkit.run.process_limits import limit_problems

_NODE_SIZES = (1, 2, 4, 8)
_OFFERS = 3
LONG_SEQUENCE = 16384
"""Tokens of a sequence from which on context parallelism is offered: shorter ones leave ranks little work; assumed."""


def finalize_run(run: ResolvedRun) -> ResolvedRun:
    """The run as it will start.

    Raises what the first rank of a start would raise, and RequestError when the run doesn't fit into GPU memory, or
    into the limits of this process where its ranks are this machine's.
    """
    if not run.config.launch.is_scheduled:
        RequestError.raise_all(list(limit_problems(run)))
    mode = resume_plan.check_start(run)
    return dataclasses.replace(plan_memory(run), start_mode=mode)


def plan_memory(run: ResolvedRun, *, refuse: bool = True) -> ResolvedRun:
    """The run with its estimates, its recomputation and, where its ranks run in this environment, its kernels.

    With `refuse`, RequestError when it doesn't fit into GPU memory, --gpu_name names a GPU of unknown memory, or Triton
    can't compile here.
    """
    launch = run.config.launch
    if launch.runtime == "none" and not launch.is_scheduled:
        if refuse and run.accelerator == "gpu":
            check_triton()
        return _planned(run, installed_libraries(), refuse=refuse)
    # An image or another Python is expected to have all libraries; the node that chooses will know.
    uses_this_python = launch.runtime == "none" and launch.python is None
    expected = installed_libraries() if uses_this_python else frozenset(LIBRARIES)
    return dataclasses.replace(_planned(run, expected, refuse=refuse), kernels=None)


def choose_on_node(run_file: Path, log_dir: Path) -> Path:
    """Choose the kernels and recomputation of a run by this machine's packages and GPU, and record them.

    They are written to the experiment's run.json and to that of the attempt, whose path is given: other nodes can't
    have an older version of it in a cache. Raises RequestError when a kernel that was asked for can't be used here,
    Triton can't compile here, or the run doesn't fit into GPU memory.
    """
    run = read_run(run_file)
    if run.accelerator == "gpu":
        check_triton()
        name, memory_gib = describe_gpu()
        asked_gib = run.config.launch.gpu_memory_gib
        run = dataclasses.replace(run, gpu_name=name or run.gpu_name, gpu_memory_gib=asked_gib or memory_gib)
    run = _planned(run, installed_libraries(), refuse=True)
    attempt_file = log_dir / run_file.name
    for path in (run_file, attempt_file):
        write_run(path, run)
    return attempt_file


def _planned(run: ResolvedRun, installed: frozenset[str], *, refuse: bool) -> ResolvedRun:
    """The run with estimates, recomputation and kernels where these libraries are installed; no estimates on CPU."""
    run = dataclasses.replace(run, kernels=choose_for(run, installed))
    if run.accelerator != "gpu":
        return run
    asked = run.config.launch.gpu_name
    if refuse and asked and gpu_memory(run) is None:  # a GPU of this machine need not be known
        raise RequestError(
            f"{asked!r}: unknown, or sold with several memory sizes",
            needed=", ".join(name for name, (_, memory_gib) in GPUS.items() if memory_gib),
            action="name it with its size, such as 'A100 80GB', or give its memory with --gpu_memory_gib",
            where="--gpu_name",
        )
    if refuse and run.fp8 and run.gpu_name and lacks_fp8(run.gpu_name):
        raise RequestError(
            f"{run.gpu_name} has no FP8 products",
            needed="compute capability 8.9 or later (Ada, Hopper, Blackwell)",
            action="train with --precision bf16; a run can change between bf16 and fp8 whenever it continues",
            where="--precision fp8",
        )
    run = _recomputing(run)
    run = dataclasses.replace(run, kernels=choose_for(run, installed))  # recomputation rules out some of them
    estimates = estimate(run)
    if refuse and not fits(run, estimates):
        raise RequestError(
            f"about {estimates.memory_gib:.1f} GiB on the fullest GPU: {estimates.weights_gib:.1f} weights, gradients "
            f"and optimizer, {estimates.activations_gib:.1f} activations, {estimates.logits_gib:.1f} logits",
            needed=f"less than its {estimates.gpu_memory_gib:.1f} GiB, without CUDA's own share",
            action=_advice(run),
            where="memory",
        )
    return dataclasses.replace(run, estimates=estimates)


def _recomputing(run: ResolvedRun) -> ResolvedRun:
    return cheapest_recompute(run) if run.config.training.recompute == "auto" else run


def _advice(run: ResolvedRun) -> str:
    """Changes that would make the run fit, each with the memory that it then needs."""
    changes = ((change, _recomputing(changed)) for change, changed in _changes(run))
    found = ((change, changed, estimate(changed)) for change, changed in changes)
    offers = (f"{change} ({needs.memory_gib:.1f} GiB)" for change, changed, needs in found if fits(changed, needs))
    listed = ", or ".join(itertools.islice(offers, _OFFERS))
    return f"use {listed}" if listed else "use more GPUs, or a smaller model"


def _changes(run: ResolvedRun) -> Iterator[tuple[str, ResolvedRun]]:
    training, parallel, shape = run.config.training, run.config.parallel, run.model
    if training.recompute != "auto":
        yield "--recompute auto", _replaced(run, recompute="auto")
    if training.micro_batch_size > 1:
        yield "--micro_batch_size 1", _replaced(run, micro_batch_size=1)
    yield from _expert_changes(run)
    tensor, pipeline, context = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    length = run.config.data.sequence_length
    heads, rows = [shape.num_attention_heads, shape.num_query_groups], shape.expert_ffn_hidden_size
    if wide := shape.features.global_attention:
        heads.append(wide.num_query_groups)
    sizes = sorted(
        (
            (tp, pp, cp)
            for tp in _NODE_SIZES
            for pp in range(pipeline, shape.num_layers + 1)
            for cp in (_NODE_SIZES if length >= LONG_SEQUENCE else (context,))
            if tp >= tensor and cp >= context and (tp, pp, cp) != (tensor, pipeline, context)
            if shape.num_layers % pp == 0 and length % math.lcm(2 * cp if cp > 1 else 1, cp * tp) == 0
            if not any(count % tp for count in (*heads, rows or shape.ffn_hidden_size))
        ),
        key=lambda size: (math.prod(size), size[1], size[0]),
    )
    for tp, pp, cp in sizes:
        changed = dataclasses.replace(
            parallel, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp
        )
        yield _spread(run, changed, f"-T {tp} -P {pp}" + (f" -C {cp}" if cp != context else ""))


def _expert_changes(run: ResolvedRun) -> Iterator[tuple[str, ResolvedRun]]:
    """Larger expert parallel sizes that the model and a number of GPUs allow."""
    parallel, count = run.config.parallel, run.model.num_experts
    for size in _NODE_SIZES if count else ():
        if size <= parallel.expert_model_parallel_size or count % size:
            continue
        changed = dataclasses.replace(parallel, expert_model_parallel_size=size)
        stages, expert_tensor = changed.pipeline_model_parallel_size, changed.expert_tensor_parallel
        yield _spread(run, changed, f"--expert_model_parallel_size {size}", stages * size * expert_tensor)


def _replaced(run: ResolvedRun, **training: object) -> ResolvedRun:
    changed = dataclasses.replace(run.config.training, **training)  # type: ignore[arg-type]
    return dataclasses.replace(run, config=dataclasses.replace(run.config, training=changed))


def _spread(run: ResolvedRun, parallel: ParallelConfig, flags: str, unit: int = 1) -> tuple[str, ResolvedRun]:
    """The run with other parallel sizes, on more GPUs where these or `unit` don't divide their number; and in words."""
    unit = math.lcm(parallel.model_parallel_size, unit)
    world_size = -(-run.world_size // unit) * unit
    more = f" on {world_size} GPUs" if world_size != run.world_size else ""
    config = dataclasses.replace(run.config, parallel=parallel)
    changed = dataclasses.replace(
        run,
        config=config,
        world_size=world_size,
        data_parallel_size=world_size // parallel.model_parallel_size,
        sequence_parallel=resolve.sequence_parallel(config),
    )
    return flags + more, changed
