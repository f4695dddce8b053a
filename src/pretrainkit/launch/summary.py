"""A resolved run in a few lines, for people."""

from __future__ import annotations

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.units import format_count


def summarize(run: ResolvedRun) -> str:
    """The run as aligned lines 'what  value', without a newline at the end."""
    config, model, parallel = run.config, run.model, run.config.parallel
    training, optimizer = config.training, config.optimizer
    evaluation = (
        f"every {training.val_interval} steps, {training.val_steps} batches" if training.val_interval else "none"
    )
    lines = {
        "experiment": run.experiment_dir,
        "model": f"{model.family}, {model.num_layers} layers, hidden size {model.hidden_size}, "
        f"{model.num_attention_heads} heads ({model.num_query_groups} key/value), "
        f"vocabulary {model.vocab_size} padded to {run.padded_vocab_size}",
        "tokenizer": run.hf_folder,
        "weights": run.initial_checkpoint or "random",
        "data": f"{format_count(run.dataset.num_tokens)} tokens, {format_count(run.dataset.num_documents)} documents, "
        f"split {config.data.split}, sequences of {config.data.sequence_length}",
        "ranks": f"{run.world_size} ({run.accelerator}, {run.precision}) = TP {parallel.tensor_model_parallel_size}"
        f"{' with sequence parallel' if run.sequence_parallel else ''} x PP {parallel.pipeline_model_parallel_size}"
        f" x CP {parallel.context_parallel_size} x DP {run.data_parallel_size}",
        "batch": f"{training.global_batch_size} samples a step, {training.micro_batch_size} a forward pass, "
        f"{format_count(training.global_batch_size * config.data.sequence_length)} tokens a step",
        "steps": f"{run.max_steps}, a checkpoint every {training.save_interval}; evaluation {evaluation}",
        "optimizer": f"lr {optimizer.lr:g} -> {run.min_lr:g} {optimizer.lr_schedule}, warm-up {run.lr_warmup_steps}, "
        f"decay to step {run.lr_decay_steps}, weight decay {optimizer.weight_decay:g}, clip {optimizer.clip_grad:g}",
        "seed": str(training.seed),
    }
    return "\n".join(f"{name:<10} {value}" for name, value in lines.items())
