"""A resolved run in a few lines, for people."""

from __future__ import annotations

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.units import format_count, format_duration


def summarize(run: ResolvedRun) -> str:
    """The run as aligned lines 'what  value', without a newline at the end."""
    config, model, parallel = run.config, run.model, run.config.parallel
    training, optimizer = config.training, config.optimizer
    evaluation = (
        f"every {training.val_interval} steps and at the end, {training.val_steps} batches"
        if training.val_interval
        else "none"
    )
    lines = {
        "experiment": run.experiment_dir,
        "model": f"{model.family}, {model.num_layers} layers, hidden size {model.hidden_size}, "
        f"{model.num_attention_heads} heads ({model.num_query_groups} key/value), "
        f"vocabulary {model.vocab_size} padded to {run.padded_vocab_size}",
        "tokenizer": run.hf_folder,
        "weights": run.initial_weights.checkpoint if run.initial_weights else "random",
        "data": f"{format_count(run.dataset.num_tokens)} tokens, {format_count(run.dataset.num_documents)} documents, "
        f"split {config.data.split}, sequences of {config.data.sequence_length}",
        "ranks": f"{run.world_size} ({run.accelerator}, {run.precision}) = TP {parallel.tensor_model_parallel_size}"
        f"{' with sequence parallel' if run.sequence_parallel else ''} x PP {parallel.pipeline_model_parallel_size}"
        f" x CP {parallel.context_parallel_size} x DP {run.data_parallel_size}",
        "batch": f"{training.global_batch_size} samples a step, {training.micro_batch_size} a forward pass, "
        f"{format_count(run.tokens_per_step)} tokens a step",
        "steps": f"{run.max_steps}, a checkpoint every {training.save_interval}; evaluation {evaluation}",
        "optimizer": f"lr {optimizer.lr:g} -> {run.min_lr:g} {optimizer.lr_schedule}, warm-up {run.lr_warmup_steps}, "
        f"decay to step {run.lr_decay_steps}, weight decay {optimizer.weight_decay:g}, clip {optimizer.clip_grad:g}",
        "seed": str(training.seed),
        "saves": "in the background" if run.async_save else "training waits for them",
        "starts": {"random": "from random weights", "weights": "from trained weights", "continue": "continuing"}.get(
            run.start_mode or "", "not planned"
        ),
    }
    return "\n".join([*(f"{name:<10} {value}" for name, value in lines.items()), summarize_estimates(run)])


def summarize_estimates(run: ResolvedRun) -> str:
    """What the run is expected to take, as lines of the same form."""
    estimates, recompute = run.estimates, run.recompute
    if estimates is None:
        return "estimates  none on CPU"
    gpu = f" ({run.gpu_name})" if run.gpu_name else ""
    gpu_memory = (
        f"{'' if gpu else '--gpu_name or '}--gpu_memory_gib says what it has{gpu}"
        if estimates.gpu_memory_gib is None
        else f"it has {estimates.gpu_memory_gib:.1f} GiB{gpu}"
    )
    recomputed = {"none": "none", "selective": "the MLPs", "full": f"{recompute.num_layers} layers of each stage"}
    is_final = run.kernels or run.config.training.recompute != "auto"
    lines = {
        "parameters": format_count(estimates.parameters),
        "memory": f"{estimates.memory_gib:.1f} GiB on the fullest GPU = {estimates.weights_gib:.1f} weights, gradients "
        f"and optimizer + {estimates.activations_gib:.1f} activations + {estimates.logits_gib:.1f} logits; "
        f"{gpu_memory}",
        "recomputes": recomputed[recompute.granularity] + ("" if is_final else ", expected; the compute node decides"),
        "kernels": str(run.kernels or "decided on the compute node, by its packages"),
    }
    if estimates.step_time_s is None or estimates.mfu is None or estimates.gpu_hours is None:
        lines["time"] = "no estimate for this GPU and precision"
    else:
        lines["time"] = (
            f"{format_duration(estimates.step_time_s)} a step, "
            f"{format_count(run.tokens_per_step / estimates.step_time_s)} tokens/s, {estimates.gpu_hours:.0f} "
            f"GPU-hours in all, at an assumed MFU of {estimates.mfu:.0%} (docs/pretrain.md)"
        )
    return "\n".join(f"{name:<10} {value}" for name, value in lines.items())
