"""NeMo's objects for a run: its model, trainer, strategy, optimizer, data module, logger and resume settings."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from pretrainkit.config.schema import Kernels, ResolvedRun
from pretrainkit.engine.loss_by_label import LabelledLossReduction, LossByLabel, labelled
from pretrainkit.engine.nemo import AutoTokenizer, llm
from pretrainkit.engine.nemo import lightning as nl
from pretrainkit.hf_tokenizer import readable_folder
from pretrainkit.megatron import kernels
from pretrainkit.megatron.document_attention import with_document_bounds
from pretrainkit.megatron.layer_spec import torch_layer_spec
from pretrainkit.megatron.model import expert_fields, precision_fields, recompute_fields
from pretrainkit.models.megatron_fields import nemo_model
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.resume_plan import CONTINUE, WEIGHTS, StartPlan


def build_model(
    run: ResolvedRun,
    chosen: Kernels,
    *,
    wrap_data_step: Callable[[Any], Any],
    by_label: LossByLabel | None,
    held_out: LossByLabel,
) -> llm.GPTModel:
    """NeMo's model object; it builds Megatron's modules later, on every rank that rank's part.

    `wrap_data_step` gets Megatron's data step, which takes a microbatch from a loader's iterator; gives one like it.
    """
    nemo = nemo_model(run.model)
    fields: dict[str, Any] = {
        **nemo.fields,
        **precision_fields(run.precision),
        **expert_fields(
            run.model,
            expert=run.config.parallel.expert_model_parallel_size,
            expert_tensor=run.config.parallel.expert_tensor_parallel,
            layer_spec=chosen.layer_spec,
        ),
        **router_loss_fields(run),
        "seq_length": run.config.data.sequence_length,
        "vocab_size": run.padded_vocab_size,
    }
    config: Any = pkgutil.resolve_name(nemo.config_class)(**fields)
    fused = kernels.config_fields(chosen, qk_norm=run.model.qk_norm)
    for name, value in {**recompute_fields(run.recompute), **fused}.items():
        setattr(config, name, value)  # Megatron's checks when constructed don't know the kernels that are installed
    if chosen.layer_spec == "torch":
        config.transformer_layer_spec = functools.partial(
            torch_layer_spec,
            fused_norm=chosen.norm == "triton",
            overlaps=chosen.tp_comm_overlap == "copies",
            fp8=run.fp8,
            features=run.model.features,
            rope_scaling=run.model.rope_scaling,
        )
    # Else Megatron takes the mean of the microbatches' means: tokens count more where more of their microbatch is
    # masked. Without masks both are the same, and this one reads all gradients once more.
    config.calculate_per_token_loss = run.masks_losses
    config.forward_step_fn = forward_step
    if run.reset_attention_mask:
        config.data_step_fn = with_document_bounds(config.data_step_fn)
    microbatch_step = config.data_step_fn
    config.data_step_fn = wrap_data_step(labelled(config.data_step_fn, by_label, held_out))
    tokenizer = AutoTokenizer(str(readable_folder(Path(run.hf_folder))), use_fast=True)
    model: llm.GPTModel = pkgutil.resolve_name(nemo.model_class)(config, tokenizer=tokenizer)
    model.microbatch_step = microbatch_step  # a loader's batch as the model gets it
    if by_label:
        model._training_loss_reduction = LabelledLossReduction(by_label)
    model._validation_loss_reduction = LabelledLossReduction(held_out, validation_step=True)
    return model


def forward_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run the model over a microbatch; gives the loss of each token [batch, sequence] on the last pipeline stage.

    Attention is causal by construction; a mask, where there is one, holds the bounds of documents.
    """
    output: torch.Tensor = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=batch["labels"],
    )
    return output


def router_loss_fields(run: ResolvedRun) -> dict[str, Any]:
    """The fields of TransformerConfig that balance the load of experts; none without experts."""
    if not run.model.num_experts:
        return {}
    parallel = run.config.parallel
    # Where losses are weighted by tokens, Megatron weights each rank's part of a router's loss by that rank's tokens.
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size if run.masks_losses else 1
    return {
        "moe_aux_loss_coeff": run.router_aux_loss_coef * ranks,
        "moe_z_loss_coeff": run.config.training.router_z_loss_coef * ranks or None,
        "moe_router_bias_update_rate": run.router_bias_update_rate,
    }


def build_trainer(run: ResolvedRun, plan: StartPlan, *, local_world_size: int) -> nl.Trainer:
    """The trainer of a run, without callbacks."""
    config, parallel = run.config, run.config.parallel
    dtype = _dtype(run)
    overlap = overlaps_data_parallel(run)
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel,
        sequence_parallel=run.sequence_parallel,
        pipeline_dtype=dtype,
        process_group_backend="nccl" if run.accelerator == "gpu" else "gloo",
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=False,  # LossGuard does it
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=config.optimizer.distributed,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        ),
        ckpt_async_save=True,  # with --async_save off, Checkpoints waits for the writers
        ckpt_load_optimizer=plan.optimizer_state != "reset",
        # The only format whose optimizer state can be loaded with another TP, PP or DP.
        ckpt_optim_fully_reshardable=True,
        replace_progress_bar=False,
    )
    precision = nl.MegatronMixedPrecision(
        precision="bf16-mixed" if run.precision == "bf16" else "32",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_enabled=False,
        grad_reduce_in_fp32=True,
    )
    validates = config.training.val_interval > 0
    trainer = nl.Trainer(
        accelerator=run.accelerator,
        devices=local_world_size,
        num_nodes=run.world_size // local_world_size,
        strategy=strategy,
        # To detect its environment, Lightning would initialise MPI, which reaps child processes that aren't its own.
        plugins=[precision, TorchElasticEnvironment()],
        max_steps=run.max_steps,
        val_check_interval=config.training.val_interval if validates else run.max_steps,
        check_val_every_n_epoch=None,
        limit_val_batches=run.evaluation_steps if validates else 0,
        # Tensors that a layer keeps, such as rotary angles, would be without gradients after the first evaluation.
        inference_mode=False,
        limit_test_batches=0,
        num_sanity_val_steps=0,
        logger=False,  # see recording.begin_recorder
        enable_checkpointing=False,  # see callbacks.checkpoints
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    # On SIGTERM Lightning raises SystemExit without a code before anything is saved; StopEarly handles signals.
    trainer._signal_connector.register_signal_handlers = lambda: None
    return trainer


def overlaps_data_parallel(run: ResolvedRun) -> bool:
    """Whether gradient reduction and parameter gathering overlap with computation.

    Megatron's DDP and its optimizer must both be configured for it.
    """
    return run.accelerator == "gpu" and run.config.optimizer.distributed and run.data_parallel_size > 1


def _dtype(run: ResolvedRun) -> torch.dtype:
    return torch.bfloat16 if run.precision == "bf16" else torch.float32


def build_optimizer(run: ResolvedRun) -> nl.MegatronOptimizerModule:
    """Adam; OptimizerSettings gives it the learning rate of each step."""
    settings = run.config.optimizer
    return nl.MegatronOptimizerModule(
        config=OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            bf16=run.precision == "bf16",
            params_dtype=_dtype(run),
            use_distributed_optimizer=settings.distributed,
            overlap_param_gather=overlaps_data_parallel(run),
        )
    )


def build_logger(run: ResolvedRun) -> nl.NeMoLogger:
    """NeMo's logger, which only gets a folder for its own log files."""
    return nl.NeMoLogger(
        explicit_log_dir=str(RunFolder.of(run).logs / "nemo"),
        update_logger_directory=False,
        log_global_rank_0_only=True,
    )


def resume_settings(plan: StartPlan) -> nl.AutoResume:
    """What NeMo restores, and from which checkpoint."""
    if plan.mode == CONTINUE:
        return nl.AutoResume(resume_from_path=plan.checkpoint)
    if plan.mode == WEIGHTS:
        weights = nl.RestoreConfig(path=plan.checkpoint, load_model_state=True, load_optim_state=False)
        return nl.AutoResume(restore_config=weights)
    return nl.AutoResume()
