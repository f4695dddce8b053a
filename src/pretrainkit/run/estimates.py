"""Estimates of a run before it starts: memory of the fullest GPU, time of a step, GPU-hours. Pure.

Memory is counted from the tensors that live at the peak, the end of a microbatch's forward pass:

| part | bytes |
|---|---|
| a parameter (bf16) | 2 + 4 for its gradient in fp32 + 12 for the fp32 copy and the two moments, these over DP x CP |
| a parameter (fp32) | 4 + 4 + 8 over DP x CP |
| a parameter of a layer in FP8, also of an expert | 2 more: its FP8 copies, as it is and transposed |
| a parameter of an expert | the same on the ranks that share it (EP x ETP), its optimizer's over the others |
| a token in a layer | what `_layer_elements` lists, split over TP with sequence parallelism or by column |
| a token at an expert | the same for the experts that it visits, whose loads are assumed to be even |
| a token at the head | LOGITS_BYTES per row of the vocabulary on this rank |

The first pipeline stage keeps the activations of as many microbatches as there are stages, the last one those of one
microbatch and its logits; the larger of the two counts. CUDA and NCCL need RESERVE_GIB outside torch's allocator.

Time is the model's FLOPs over the GPU's peak times an assumed MFU, from the table below.
"""

from __future__ import annotations

import dataclasses
import math

from pretrainkit.config.schema import Estimates, Kernels, Recompute, ResolvedRun
from pretrainkit.megatron.kernels import PLAIN
from pretrainkit.models.flops import (
    active_parameters,
    expert_parameters,
    layer_parameters,
    other_attention_parameters,
    parameters,
    training_flops_per_token,
    value_head_dim,
    with_global_heads,
)
from pretrainkit.run.gpu_specs import memory_gib, peak_flops

GIB = 2**30
LOGITS_BYTES = {"fused": 2, "plain": 10}
"""Per logit: bf16 logits that are overwritten by their gradient; or, measured on an H100, with fp32 copies."""
RESERVE_GIB = {"one GPU": 0.7, "several": 1.5}
"""Memory of CUDA, its libraries, NCCL and communication buffers, outside torch's allocator (assumed)."""
FP8_COPIES_BYTES = 2

MFU = {
    "fused": (0.49, 0.51, 0.53),
    "te": (0.40, 0.45, 0.52),
    "plain": (0.39, 0.40, 0.41),
    "fp8": (0.49, 0.51, 0.72),
    "experts": (0.28, 0.35, 0.39),
}
"""Assumed, from runs on one H100 in bf16, for little, medium and much work per layer and microbatch (WORK). In FP8, of
the bf16 peak, much is from one H200 (70% for the 1B shape, 80% for the 8B shape); little and medium are bf16's. Of
experts, by active parameters, from one H200 (35 and 39% for Qwen3-30B-A3B's layers, 45% for Mixtral's); little is a
guess."""
WORK = (0.3e12, 0.7e12)
"""Limits between them: parameters of a layer on one rank x tokens of a microbatch."""
TENSOR_PARALLEL_SHARE, DATA_PARALLEL_SHARE, FP8_TENSOR_PARALLEL_SHARE = 0.85, 0.98, 0.4
EXPERT_PARALLEL_SHARE = 0.87
"""Speed of a GPU among several over that of one, from runs on two; also used for CP and for more GPUs."""


def estimate(run: ResolvedRun) -> Estimates:
    """The estimates of a resolved run, with its kernels and recomputation."""
    fullest = max(_stage_bytes(run, is_first=True), _stage_bytes(run, is_first=False), key=sum)
    weights, activations, logits = (part / GIB for part in fullest)
    mfu, step_time_s = _speed(run)
    return Estimates(
        parameters=parameters(run.model, run.padded_vocab_size),
        active_parameters=active_parameters(run.model, run.padded_vocab_size),
        exchange_gib=round(_exchange_bytes(run) / GIB, 2),
        weights_gib=round(weights, 2),
        activations_gib=round(activations, 2),
        logits_gib=round(logits, 2),
        memory_gib=round(sum(fullest) / GIB, 2),
        gpu_memory_gib=gpu_memory(run),
        mfu=mfu and round(mfu, 3),
        step_time_s=step_time_s and round(step_time_s, 6),  # less than 1 ms for a tiny model
        gpu_hours=step_time_s and round(step_time_s * run.max_steps * run.world_size / 3600, 1),
    )


def gpu_memory(run: ResolvedRun) -> float | None:
    """Memory of each GPU in GiB: as configured or detected, else by its name."""
    return run.gpu_memory_gib or (memory_gib(run.gpu_name) if run.gpu_name else None)


def fits(run: ResolvedRun, estimates: Estimates) -> bool:
    """Whether the run fits into its fullest GPU; True where the GPU's memory isn't known."""
    reserve = RESERVE_GIB["one GPU" if run.world_size == 1 else "several"]
    return estimates.gpu_memory_gib is None or estimates.memory_gib + reserve <= estimates.gpu_memory_gib


def cheapest_recompute(run: ResolvedRun) -> ResolvedRun:
    """The run with the least recomputation that fits: none, or as few layers as possible; all layers, if none fits."""
    layers = run.model.num_layers // run.config.parallel.pipeline_model_parallel_size
    for count in range(layers + 1):
        run = dataclasses.replace(run, recompute=Recompute("full", count) if count else Recompute())
        if fits(run, estimate(run)):
            break
    return run


def _stage_bytes(run: ResolvedRun, *, is_first: bool) -> tuple[float, float, float]:
    """Bytes of weights with gradients and optimizer state, activations, and logits on a GPU of one stage."""
    shape, parallel = run.model, run.config.parallel
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    layers, is_last = shape.num_layers // stages, not is_first or stages == 1
    embedding = run.padded_vocab_size * shape.hidden_size / tensor
    embeddings = 2 if stages == 1 and not shape.tie_word_embeddings else 1
    visited = shape.experts_per_token * expert_parameters(shape)
    own = range(layers) if is_first else range(shape.num_layers - layers, shape.num_layers)
    sparse = len(set(own) & set(shape.expert_layers))
    matrices = (layers - sparse) * layer_parameters(shape, is_dense=True) + sparse * (layer_parameters(shape) - visited)
    matrices += other_attention_parameters(shape, own)
    on_rank = matrices / tensor + layers * 2 * shape.hidden_size + embeddings * embedding
    bf16 = run.precision == "bf16"
    weights, experts = _state_bytes(run, on_rank, run.world_size // (stages * tensor)), 0.0
    if shape.num_experts:
        sharing = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel
        experts = sparse * shape.num_experts * expert_parameters(shape) / sharing
        weights += _state_bytes(run, experts, run.world_size // (stages * sharing))
    if run.fp8:
        ends = run.fp8.first_last_bf16 * (2 if stages == 1 else 1)
        weights += FP8_COPIES_BYTES * max(1 - ends / layers, 0) * (matrices / tensor + experts)

    element, tokens = 2 if bf16 else 4, _tokens(run)
    in_flight = min(stages, run.num_microbatches) if is_first else 1
    kept, transient = _kept_elements(run, layers)
    activations = in_flight * kept * tokens * element
    logits_of = LOGITS_BYTES["plain" if _kernels(run).cross_entropy == PLAIN else "fused"] * (1 if bf16 else 2)
    logits = tokens * run.padded_vocab_size / tensor * logits_of if is_last else 0.0
    # Gradients and recomputed activations are allocated after the logits are freed.
    return weights, activations, max(logits, transient * tokens * element)


def _state_bytes(run: ResolvedRun, on_rank: float, copies: int) -> float:
    """Bytes of parameters on a rank, their gradients and optimizer state, which as many `copies` share."""
    shards = copies if run.config.optimizer.distributed else 1
    return on_rank * ((6 + 12 / shards) if run.precision == "bf16" else (8 + 8 / shards))


def _kernels(run: ResolvedRun) -> Kernels:
    assert run.kernels
    return run.kernels


def _tokens(run: ResolvedRun) -> float:
    """Tokens of a microbatch on one rank."""
    length = run.config.data.sequence_length / run.config.parallel.context_parallel_size
    return run.config.training.micro_batch_size * length


def _layer_elements(run: ResolvedRun) -> tuple[float, float, float]:
    """Elements per token that a layer keeps on one rank: its input, the rest without the MLP's, and the MLP's."""
    shape, tensor = run.model, run.config.parallel.tensor_model_parallel_size
    split = tensor if run.sequence_parallel else 1
    hidden, ffn = shape.hidden_size / split, shape.ffn_hidden_size / tensor
    # The mean of local layers and of those with other heads.
    part = len(shape.global_layers) / shape.num_layers if shape.features.global_attention else 0
    heads = keys = values = 0.0
    for one, weight in ((shape, 1 - part), (with_global_heads(shape), part)):
        heads += weight * one.num_attention_heads * one.head_dim / tensor
        values += weight * one.num_attention_heads * value_head_dim(one) / tensor
        keys += weight * one.num_query_groups * (one.head_dim + value_head_dim(one)) / tensor
    # Our attention keeps the keys and values of all CP ranks.
    keys *= 1 if _kernels(run).layer_spec == "te" else run.config.parallel.context_parallel_size
    # What a weight's gradient is computed from, in halves of bf16's two bytes.
    input_ = 0.5 if run.fp8 and run.fp8.recipe != "rowwise_wgrad_bf16" else 1.0
    # Input of the norm; the normed input of qkv; query, key, value; attention's output as computed and as projected;
    # the second norm's input.
    rest = input_ * hidden + (heads + keys) + (1 + input_) * values + hidden
    if latent := shape.features.latent_attention:
        # The latent vectors, as projected and normed; keys' rotated part, and queries and keys before they are joined.
        rest += (2 * (latent.q_lora_rank + latent.kv_lora_rank) + latent.qk_rope_head_dim) / split + heads + keys
    # Its normed input; gate and up; their product; without a fused kernel the gate's activation.
    mlp = input_ * (hidden + ffn) + 2 * ffn + (0 if run.fp8 or _kernels(run).swiglu != PLAIN else ffn)
    return hidden, rest, _expert_elements(run, hidden) if shape.num_experts else mlp


def _expert_elements(run: ResolvedRun, hidden: float) -> float:
    """Elements per token of a microbatch that experts and their router keep on one rank (`hidden`: of a token's H)."""
    shape, split, expert_tensor = run.model, run.model.hidden_size / hidden, run.config.parallel.expert_tensor_parallel
    count, ffn = shape.experts_per_token, shape.expert_ffn_hidden_size / expert_tensor
    # The normed input; in the router, logits and probabilities in fp32 and the map of each token, three times; numbers.
    router = hidden + (6.5 * shape.num_experts + 10 * count) / split
    # A row: what an expert gets; gate and up and their product; on a CPU gate, up, SiLU's output and the product in
    # fp32, too.
    rows = count * expert_tensor / split
    kept = 3 if run.accelerator == "gpu" else 9
    shared = shape.shared_expert_ffn_hidden_size / run.config.parallel.tensor_model_parallel_size
    return router + rows * (shape.hidden_size + kept * ffn) + 4 * shared


def _exchange_bytes(run: ResolvedRun) -> float:
    """Bytes that a rank sends in a step to the experts of others and back, of even loads.

    A token goes once to each rank that has some of its experts, with its probabilities there in fp32, and comes back;
    the same with gradients. Recomputed layers send it again.
    """
    shape, parallel = run.model, run.config.parallel
    ranks = parallel.expert_model_parallel_size
    if ranks == 1:
        return 0.0
    local = shape.num_experts // ranks
    missed = math.comb(shape.num_experts - local, shape.experts_per_token)
    visited = (ranks - 1) * (1 - missed / math.comb(shape.num_experts, shape.experts_per_token))
    stages = parallel.pipeline_model_parallel_size
    tokens = run.tokens_per_step / (run.world_size / stages)
    again = _recomputed_share(run) if run.recompute.granularity == "full" else 0.0
    hidden, probabilities = shape.hidden_size * (2 if run.precision == "bf16" else 4), 4 * local
    layers = len(shape.expert_layers) / stages
    return layers * tokens * visited * ((4 + 2 * again) * hidden + (2 + again) * probabilities)


def _kept_elements(run: ResolvedRun, layers: int) -> tuple[float, float]:
    """Elements per token that a stage keeps until the backward pass, and those at the peak of the backward pass."""
    layer_input, rest, mlp = _layer_elements(run)
    whole = layer_input + rest + mlp
    recompute = run.recompute
    recomputed = {"none": 0.0, "selective": mlp, "full": whole}[recompute.granularity]
    transient = recomputed + mlp  # recomputed activations, and gradients
    if recompute.granularity == "selective":
        return layers * (layer_input + rest), transient
    count = recompute.num_layers if recompute.granularity == "full" else 0
    return count * layer_input + (layers - count) * whole, transient


def _speed(run: ResolvedRun) -> tuple[float | None, float | None]:
    """Assumed MFU and seconds of a step; None for GPUs, precisions and models without a figure."""
    peak = peak_flops(run.gpu_name) if run.gpu_name else None
    if peak is None or run.precision != "bf16":
        return None, None
    parallel, shape = run.config.parallel, run.model
    work = layer_parameters(shape) / parallel.tensor_model_parallel_size * _tokens(run)
    kernels = _kernels(run)
    layers = (
        "experts"
        if shape.num_experts
        else "fp8"
        if run.fp8
        else "te"
        if kernels.layer_spec == "te"
        else "plain"
        if kernels.cross_entropy == PLAIN
        else "fused"
    )
    mfu = MFU[layers][sum(work > bound for bound in WORK)]
    if parallel.tensor_model_parallel_size * parallel.context_parallel_size > 1:
        mfu *= FP8_TENSOR_PARALLEL_SHARE if run.fp8 else TENSOR_PARALLEL_SHARE
    if parallel.expert_model_parallel_size > 1:
        mfu *= EXPERT_PARALLEL_SHARE
    if run.data_parallel_size > 1:
        mfu *= DATA_PARALLEL_SHARE
    stages = parallel.pipeline_model_parallel_size
    mfu *= run.num_microbatches / (run.num_microbatches + stages - 1)  # the pipeline bubble
    mfu /= 1 + _recomputed_share(run) / 3  # a forward pass is a third of a step
    length = run.config.data.sequence_length
    flops = training_flops_per_token(shape, length) * run.tokens_per_step
    return mfu, flops / (run.world_size * peak * mfu)


def _recomputed_share(run: ResolvedRun) -> float:
    shape, recompute = run.model, run.recompute
    if recompute.granularity == "selective":
        return 3 * shape.hidden_size * shape.ffn_hidden_size / layer_parameters(shape)
    return recompute.num_layers * run.config.parallel.pipeline_model_parallel_size / shape.num_layers
