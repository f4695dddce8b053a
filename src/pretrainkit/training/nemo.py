"""A resolved run, trained by NeMo's LLM collection under Lightning. The only module that knows NeMo.

Everything that is a decision of ours (which checkpoint, the learning rate, what is recorded, how layers are
built without Transformer Engine) lives in its own module; here they are connected to NeMo's objects.
"""

from __future__ import annotations

import importlib.util
import logging as python_logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import nemo.lightning.io.pl as nemo_checkpoint_io
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.llm.gpt.model.llama import Llama31Config, LlamaConfig, LlamaModel
from nemo.lightning.pytorch.optim.base import LRSchedulerModule
from nemo.utils import logging as nemo_logging

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import get_logger
from pretrainkit.training import optimizer, resume
from pretrainkit.training.layer_spec import torch_layer_spec
from pretrainkit.training.model_config import transformer_config_fields
from pretrainkit.training.records import RunRecorder
from pretrainkit.training.schedule import Schedule, schedule_of

HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None

log = get_logger(__name__)


def train(run: ResolvedRun, *, rank: int, local_world_size: int) -> None:
    """Train `run` to its last step on this rank, continuing from its newest complete checkpoint."""
    experiment = Path(run.experiment_dir)
    nemo_logging.setLevel(python_logging.ERROR)
    if run.accelerator == "cpu":
        # NeMo asserts that CUDA is initialised, to move restored tensors between devices; there is one device.
        nemo_checkpoint_io._fix_tensors_device = lambda checkpoint: checkpoint
    if not HAS_TRANSFORMER_ENGINE:
        optimizer.use_in_megatron()

    start = resume.newest_complete(experiment / "checkpoints")
    first_step = start.step if start else 0
    if first_step >= run.max_steps:
        log.info("nothing to do: %d of %d steps are done", first_step, run.max_steps)
        return
    recorder = None
    if rank == 0:
        resume.quarantine_incomplete(experiment / "checkpoints")
        recorder = RunRecorder(
            experiment / "metrics.jsonl",
            tokens_per_step=run.config.training.global_batch_size * run.config.data.sequence_length,
            max_steps=run.max_steps,
            world_size=run.world_size,
        )
        recorder.event("start", step=first_step, weights=_origin(run, start), world_size=run.world_size)
        log.info("starting at step %d of %d from %s", first_step, run.max_steps, _origin(run, start))

    model = _model(run)
    trainer = _trainer(run, local_world_size)
    trainer.callbacks.insert(0, _Recording(run, recorder))  # before the saving of checkpoints, to time the step alone
    pl.seed_everything(run.config.training.seed, workers=True, verbose=False)
    llm.pretrain(
        model=model,
        data=_data(run, model.tokenizer),
        trainer=trainer,
        optim=_optimizer(run),
        log=_logger(run, experiment, recorder),
        resume=_resume(run, start),
    )


def _origin(run: ResolvedRun, start: resume.Checkpoint | None) -> str:
    return str(start.path) if start else run.initial_checkpoint or "random weights"


def _model(run: ResolvedRun) -> LlamaModel:
    """NeMo's model object; Megatron's modules are built later, on every rank its own part."""
    shape = run.model
    fields: dict[str, Any] = transformer_config_fields(
        shape, precision=run.precision, has_transformer_engine=HAS_TRANSFORMER_ENGINE
    )
    fields |= {
        "seq_length": run.config.data.sequence_length,
        "rotary_base": shape.rope_theta,
        "share_embeddings_and_output_weights": shape.tie_word_embeddings,
        "vocab_size": run.padded_vocab_size,
    }
    config = LlamaConfig(**fields)
    if shape.rope_scaling:
        scaling = shape.rope_scaling
        config = Llama31Config(
            scale_factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            old_context_len=scaling.original_max_position_embeddings,
            **fields,
        )
    # Set after construction, so that NeMo's saved context keeps its own defaults and loads anywhere.
    if not HAS_TRANSFORMER_ENGINE:
        config.transformer_layer_spec = torch_layer_spec
    config.forward_step_fn = _forward_step
    return LlamaModel(config, tokenizer=AutoTokenizer(run.hf_folder, use_fast=True))


def _forward_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Megatron's forward step without a mask: attention is causal by construction."""
    return model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
    )


def _data(run: ResolvedRun, tokenizer: AutoTokenizer) -> llm.PreTrainingDataModule:
    dataset, gpu = run.dataset, run.accelerator == "gpu"
    paths: list[str] = list(dataset.prefixes)
    if dataset.weights:
        paths = [word for pair in zip(map(str, dataset.weights), dataset.prefixes, strict=True) for word in pair]
    data = llm.PreTrainingDataModule(
        paths=paths,
        seq_length=run.config.data.sequence_length,
        global_batch_size=run.config.training.global_batch_size,
        micro_batch_size=run.config.training.micro_batch_size,
        num_workers=run.config.data.num_workers,
        pin_memory=gpu,
        persistent_workers=run.config.data.num_workers > 0,
        tokenizer=tokenizer,
        split=run.config.data.split,
        seed=run.config.training.seed,
        # Megatron names its index after the settings, not the data: other data, other folder.
        index_mapping_dir=str(Path(run.experiment_dir) / "index" / dataset.data_hash[:16]),
    )
    data.create_attention_mask = False  # without Transformer Engine NeMo adds a mask of S x S to every sample
    return data


def _trainer(run: ResolvedRun, local_world_size: int) -> nl.Trainer:
    config, parallel = run.config, run.config.parallel
    gpu, bf16 = run.accelerator == "gpu", run.precision == "bf16"
    overlap = gpu and config.optimizer.distributed and run.data_parallel_size > 1
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=run.sequence_parallel,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        process_group_backend="nccl" if gpu else "gloo",
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=True,
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=config.optimizer.distributed,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        ),
        ckpt_async_save=False,
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
    return nl.Trainer(
        accelerator=run.accelerator,
        devices=local_world_size,
        num_nodes=run.world_size // local_world_size,
        strategy=strategy,
        plugins=precision,
        max_steps=run.max_steps,
        val_check_interval=config.training.val_interval if validates else run.max_steps,
        check_val_every_n_epoch=None,
        limit_val_batches=config.training.val_steps if validates else 0,
        limit_test_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=config.training.log_interval,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


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
            overlap_param_gather=False,
        ),
        lr_scheduler=_LearningRate(schedule_of(run), settings.weight_decay),
    )


def _logger(run: ResolvedRun, experiment: Path, recorder: RunRecorder | None) -> nl.NeMoLogger:
    return nl.NeMoLogger(
        explicit_log_dir=str(experiment / "logs" / "nemo"),
        update_logger_directory=False,
        log_global_rank_0_only=True,
        tensorboard=TensorBoardLogger(save_dir=str(experiment), name="tensorboard", version=""),
        ckpt=_Checkpoints(
            recorder,
            dirpath=str(experiment / "checkpoints"),
            every_n_train_steps=run.config.training.save_interval,
        ),
    )


def _resume(run: ResolvedRun, start: resume.Checkpoint | None) -> nl.AutoResume:
    if start:
        return nl.AutoResume(resume_from_path=str(start.path))
    if run.initial_checkpoint:
        weights = nl.RestoreConfig(path=run.initial_checkpoint, load_model_state=True, load_optim_state=False)
        return nl.AutoResume(restore_config=weights)
    return nl.AutoResume()


class _LearningRate(LRSchedulerModule):
    """Our schedule as NeMo wants it."""

    def __init__(self, schedule: Schedule, weight_decay: float) -> None:
        super().__init__()
        self.schedule, self.weight_decay = schedule, weight_decay

    def scheduler(self, model: Any, optimizers: Any) -> dict[str, Any]:
        scheduler = _StepScheduler(optimizers, self.schedule, self.weight_decay)
        return {
            "optimizer": optimizers,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
            "monitor": "val_loss",
        }


class _StepScheduler(torch.optim.lr_scheduler.LRScheduler):
    """Sets learning rate and weight decay from the step and this run's settings, never from a checkpoint.

    Only the step is saved: a checkpoint's parameter groups hold the old run's values, and a resumed run that
    was given others must use the others.
    """

    def __init__(self, megatron_optimizer: Any, schedule: Schedule, weight_decay: float) -> None:
        self.schedule, self.weight_decay = schedule, weight_decay
        super().__init__(megatron_optimizer)

    def get_lr(self) -> list[float]:
        return [self.schedule.learning_rate(self.last_epoch)] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = self.get_lr()
        for group, value in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = value
            group["weight_decay"] = self.weight_decay * group.get("pre_wd_mult", 1.0)


class _Checkpoints(nl.ModelCheckpoint):
    """Saves every so many steps and after the last one; each checkpoint ends with our commit mark."""

    def __init__(self, recorder: RunRecorder | None, **kwargs: Any) -> None:
        super().__init__(
            monitor=None,
            save_last=False,
            save_top_k=-1,
            save_optim_on_train_end=True,
            auto_insert_metric_name=False,
            verbose=False,
            **kwargs,
        )
        self._recorder = recorder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step != self._last_global_step_saved:
            self._save_checkpoint(trainer, "")

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        # Lightning's own name counts the step that was just done as not done.
        folder = Path(str(self.dirpath)) / resume.checkpoint_name(trainer.global_step)
        super()._save_checkpoint(trainer, f"{folder}{self.FILE_EXTENSION}")
        if trainer.is_global_zero:
            consumed_samples = trainer.datamodule.state_dict()["consumed_samples"]
            resume.commit(folder, step=trainer.global_step, consumed_samples=consumed_samples)
            if self._recorder:
                self._recorder.event("checkpoint", step=trainer.global_step, path=str(folder))
                self._recorder.skip_time()


class _Recording(pl.Callback):
    """Hands the numbers of each step to the recorder."""

    def __init__(self, run: ResolvedRun, recorder: RunRecorder | None) -> None:
        self._run, self._recorder = run, recorder
        self._schedule = schedule_of(run)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder:
            self._recorder.start(trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if not self._recorder or (step % self._run.config.training.log_interval and step != self._run.max_steps):
            return
        metrics = trainer.callback_metrics
        grad_norm = metrics.get("grad_norm")
        self._recorder.train_step(
            step,
            loss=float(metrics["reduced_train_loss"]),
            learning_rate=self._schedule.learning_rate(step - 1),
            grad_norm=None if grad_norm is None else float(grad_norm),
        )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder:
            self._recorder.validation(trainer.global_step, loss=float(trainer.callback_metrics["val_loss"]))
            self._recorder.skip_time()
