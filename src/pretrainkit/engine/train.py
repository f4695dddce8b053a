"""A resolved run, trained by NeMo's LLM collection under Lightning. With its nemo_* neighbours, all that knows NeMo.

Everything that is a decision of ours (which checkpoint, the learning rate, what is recorded, how layers are
built without Transformer Engine) lives in its own module; here they are connected to NeMo's objects.
"""

from __future__ import annotations

import functools
import logging as python_logging
from typing import Any

import lightning.pytorch as pl
import nemo.lightning.io.pl as nemo_checkpoint_io
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.llm.gpt.model.llama import Llama31Config, LlamaConfig, LlamaModel
from nemo.utils import logging as nemo_logging

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine import loss_check, restored_weights
from pretrainkit.engine.callbacks.checkpoints import Checkpoints
from pretrainkit.engine.callbacks.evaluation import Evaluations
from pretrainkit.engine.callbacks.loss_guard import LossGuard
from pretrainkit.engine.callbacks.stop import StopEarly
from pretrainkit.engine.callbacks.training import (
    AsPlanned,
    FrozenStart,
    GraphedModel,
    LearningRate,
    Recording,
    StartParity,
    TensorBoard,
)
from pretrainkit.engine.data import data_module, watched
from pretrainkit.engine.forks import kill_children, watch_forks
from pretrainkit.engine.loader_watchdog import Readers
from pretrainkit.engine.stop_requests import StopRequests
from pretrainkit.logs import get_logger
from pretrainkit.megatron import kernels, patches
from pretrainkit.megatron.attention_kernels import attention_kernel
from pretrainkit.megatron.dataset import local_prefixes
from pretrainkit.megatron.document_attention import with_document_bounds
from pretrainkit.megatron.layer_spec import torch_layer_spec
from pretrainkit.megatron.model_config import precision_fields, recompute_fields
from pretrainkit.models.flops import training_flops_per_token
from pretrainkit.models.megatron_fields import nemo_config_fields
from pretrainkit.run.attempts import read_attempts
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.gpu_specs import peak_flops
from pretrainkit.run.lr_schedule import schedule_of
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.run.resume_plan import CONTINUE, WEIGHTS, StartPlan
from pretrainkit.run.trackers import open_trackers

log = get_logger(__name__)


def train(
    run: ResolvedRun, plan: StartPlan, *, rank: int, local_world_size: int, requests: StopRequests | None = None
) -> bool:
    """Train `run` on this rank, beginning as `plan` says; `requests` notes who asks it to stop.

    True when its last step is done; False when a signal or the time limit stopped it earlier, after saving.
    """
    requests = requests or StopRequests()
    watch_forks()
    requests.limit_time(run.config.training.time_limit, run.config.training.time_margin)
    nemo_logging.setLevel(python_logging.ERROR)
    if run.accelerator == "cpu":
        # NeMo asserts that CUDA is initialised, to move restored tensors between devices; there is one device.
        nemo_checkpoint_io._fix_tensors_device = lambda checkpoint: checkpoint
    prefixes = local_prefixes(run)
    chosen = kernels.choose_for(run)
    patches.apply_kernels(chosen)
    patches.apply_optimizer()

    recorder = _recorder(run, plan, chosen, requests) if rank == 0 else None
    parity = loss_check.begin(run, plan, rank=rank)
    readers = Readers(run.config.data.num_workers)
    model = _model(run, chosen, readers, recorder)
    trainer = _trainer(run, plan, local_world_size)
    restored_weights.watch(trainer.strategy)
    guard, graphed = LossGuard(run, recorder), GraphedModel(chosen)
    recording = Recording(run, plan, recorder, guard, graphed)
    # Steps begin when weights were compared, to be timed and stopped; before the saving, to time them alone.
    compared = [StartParity(parity, _forward_step, recorder)] if parity else []
    trainer.callbacks[:0] = [AsPlanned(plan), guard, graphed, *compared, recording, StopEarly(requests)]
    trainer.callbacks += [Evaluations(run), Checkpoints(run, recorder, saved_step=plan.step), readers, FrozenStart()]
    pl.seed_everything(run.config.training.seed, workers=True, verbose=False)
    try:
        llm.pretrain(
            model=model,
            data=data_module(run, plan, prefixes, model.tokenizer),
            trainer=trainer,
            optim=_optimizer(run),
            log=_logger(RunFolder.of(run)),
            resume=_resume(plan),
        )
        if recorder and trainer.global_step < run.max_steps:
            recorder.event("stopped", step=trainer.global_step)
    finally:
        kill_children()
        if recorder:
            recorder.close()
    # torchrun ends the first rank when another has ended 30 s before it, and a tracker's upload may take longer.
    torch.distributed.barrier()
    if trainer.global_step >= run.max_steps:
        return True
    saved = "saved" if trainer.global_step > plan.step else "with nothing new to save"
    log.warning("stopped after step %d of %d, %s", trainer.global_step, run.max_steps, saved)
    return False


def _recorder(run: ResolvedRun, plan: StartPlan, chosen: kernels.Kernels, requests: StopRequests) -> RunRecorder:
    """The records of this attempt, begun."""
    folder = RunFolder.of(run)
    furthest = max((attempt.last_step for attempt in read_attempts(folder)), default=0)
    recorder = RunRecorder(
        folder,
        tokens_per_sample=run.config.data.sequence_length,
        samples_per_step=run.config.training.global_batch_size,
        flops_per_token=training_flops_per_token(run.model, run.config.data.sequence_length),
        max_steps=run.max_steps,
        world_size=run.world_size,
        peak_flops=peak_flops(torch.cuda.get_device_name()) if run.accelerator == "gpu" else None,
    )
    attention = "te" if chosen.layer_spec == "te" else attention_kernel(run)
    used = {**chosen.to_json(), "attention": attention}
    # Before the trackers, which may fail: such a start counts as a restart, too.
    recorder.event("start", **plan.to_json(), world_size=run.world_size, kernels=used)
    requests.note_end_by(functools.partial(recorder.event, "stopped", step=plan.step))
    recorder.trackers = [
        TensorBoard(folder.path, plan.step),
        *open_trackers(run, first_step=plan.step, recorded_step=furthest),
    ]
    log.info("kernels: %s, attention %s", chosen, attention)
    log.info("starting at step %d of %d", plan.step, run.max_steps)
    return recorder


def _model(run: ResolvedRun, chosen: kernels.Kernels, readers: Readers, recorder: RunRecorder | None) -> LlamaModel:
    """NeMo's model object; Megatron's modules are built later, on every rank its own part."""
    shape = run.model
    fields: dict[str, Any] = {
        **nemo_config_fields(shape),
        **precision_fields(run.precision),
        "seq_length": run.config.data.sequence_length,
        "vocab_size": run.padded_vocab_size,
    }
    # Not a plain LlamaConfig on the way to the other: NeMo saves the arguments of a config with each checkpoint only
    # if none of its base classes was used before it in the process.
    config = (Llama31Config if shape.rope_scaling else LlamaConfig)(**fields)
    # Set after construction, so that NeMo's saved context keeps its own defaults and loads anywhere.
    if chosen.layer_spec == "torch":
        config.transformer_layer_spec = functools.partial(
            torch_layer_spec, fused_norm=chosen.norm == "triton", overlaps=chosen.tp_comm_overlap == "copies"
        )
    for name, value in recompute_fields(run.recompute).items():
        setattr(config, name, value)
    for name, value in kernels.config_fields(chosen, qk_norm=shape.qk_norm).items():
        setattr(config, name, value)
    config.forward_step_fn = _forward_step
    if run.reset_attention_mask:
        config.data_step_fn = with_document_bounds(config.data_step_fn)
    config.data_step_fn = watched(config.data_step_fn, readers, recorder)
    return LlamaModel(config, tokenizer=AutoTokenizer(run.hf_folder, use_fast=True))


def _forward_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Megatron's forward step; attention is causal by construction, and a mask is the bounds of documents."""
    return model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=batch["labels"],
    )


def _trainer(run: ResolvedRun, plan: StartPlan, local_world_size: int) -> nl.Trainer:
    config, parallel = run.config, run.config.parallel
    gpu, bf16 = run.accelerator == "gpu", run.precision == "bf16"
    overlap = _overlaps(run)
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=run.sequence_parallel,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        process_group_backend="nccl" if gpu else "gloo",
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=False,  # LossGuard's business
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=config.optimizer.distributed,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        ),
        ckpt_async_save=True,  # Checkpoints waits for it where saving in the background is off
        ckpt_load_optimizer=plan.optimizer_state != "reset",
        # The one format whose optimizer state moves to another TP, PP or DP.
        ckpt_optim_fully_reshardable=True,
        replace_progress_bar=False,
    )
    precision = nl.MegatronMixedPrecision(
        precision="bf16-mixed" if bf16 else "32",
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        autocast_enabled=False,
        grad_reduce_in_fp32=True,
    )
    validates = config.training.val_interval > 0
    trainer = nl.Trainer(
        accelerator=run.accelerator,
        devices=local_world_size,
        num_nodes=run.world_size // local_world_size,
        strategy=strategy,
        # Named, not looked for: Lightning would start MPI to ask it, and MPI waits for children that aren't its own.
        plugins=[precision, TorchElasticEnvironment()],
        max_steps=run.max_steps,
        val_check_interval=config.training.val_interval if validates else run.max_steps,
        check_val_every_n_epoch=None,
        limit_val_batches=config.training.val_steps if validates else 0,
        limit_test_batches=0,
        num_sanity_val_steps=0,
        logger=False,  # see TensorBoard
        enable_checkpointing=False,  # Checkpoints does it
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    # Lightning ends a run on SIGTERM by SystemExit without a code, before anything is saved; StopEarly has its place.
    trainer._signal_connector.register_signal_handlers = lambda: None
    return trainer


def _overlaps(run: ResolvedRun) -> bool:
    """Whether data-parallel ranks exchange gradients and weights while they compute; Megatron must hear it twice."""
    return run.accelerator == "gpu" and run.config.optimizer.distributed and run.data_parallel_size > 1


def _optimizer(run: ResolvedRun) -> nl.MegatronOptimizerModule:
    settings = run.config.optimizer
    return nl.MegatronOptimizerModule(
        config=MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            bf16=run.precision == "bf16",
            params_dtype=torch.bfloat16 if run.precision == "bf16" else torch.float32,
            use_distributed_optimizer=settings.distributed,
            overlap_param_gather=_overlaps(run),
        ),
        lr_scheduler=LearningRate(schedule_of(run), settings.weight_decay),
    )


def _logger(folder: RunFolder) -> nl.NeMoLogger:
    return nl.NeMoLogger(
        explicit_log_dir=str(folder.logs / "nemo"),
        update_logger_directory=False,
        log_global_rank_0_only=True,
    )


def _resume(plan: StartPlan) -> nl.AutoResume:
    if plan.mode == CONTINUE:
        return nl.AutoResume(resume_from_path=plan.checkpoint)
    if plan.mode == WEIGHTS:
        weights = nl.RestoreConfig(path=plan.checkpoint, load_model_state=True, load_optim_state=False)
        return nl.AutoResume(restore_config=weights)
    return nl.AutoResume()
