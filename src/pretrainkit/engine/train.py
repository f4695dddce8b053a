"""One rank's training of a resolved run: the sequence from choosing kernels to the last step."""

from __future__ import annotations

import logging
import os

import lightning.pytorch as pl
import torch

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.callbacks.before_steps import (
    BatchSizeWarmup,
    FreezeGC,
    OptimizerSettings,
    SeedWeights,
    UseCudaGraphs,
    VerifyRestoredState,
)
from pretrainkit.engine.callbacks.checkpoints import Checkpoints
from pretrainkit.engine.callbacks.fp8_check import Fp8Check
from pretrainkit.engine.callbacks.initial_loss_check import InitialLossCheck
from pretrainkit.engine.callbacks.loader_watchdog import DataLoaderWatchdog
from pretrainkit.engine.callbacks.loss_guard import LossGuard
from pretrainkit.engine.callbacks.progress import ReportProgress
from pretrainkit.engine.callbacks.recording import Recording, begin_recorder
from pretrainkit.engine.callbacks.rollback import RollBack
from pretrainkit.engine.callbacks.stop import Evaluations, StopEarly
from pretrainkit.engine.child_processes import kill_children, use_fork_timeout
from pretrainkit.engine.data_module import data_module, local_paths
from pretrainkit.engine.loss_by_label import LossByLabel, held_out_losses
from pretrainkit.engine.nemo import llm
from pretrainkit.engine.nemo import logging as nemo_logging
from pretrainkit.engine.progress import Progress
from pretrainkit.engine.router_load import RouterLoad
from pretrainkit.engine.trainer import (
    build_logger,
    build_model,
    build_optimizer,
    build_trainer,
    resume_settings,
)
from pretrainkit.logs import get_logger
from pretrainkit.megatron import patches
from pretrainkit.megatron.fp8.gemm import check_device
from pretrainkit.run import progress as records
from pretrainkit.run.resume_plan import WEIGHTS, StartPlan
from pretrainkit.run.trackers import uses_trackers
from pretrainkit.signals import RankStopRequests

log = get_logger(__name__)


def train(
    run: ResolvedRun,
    plan: StartPlan,
    *,
    rank: int,
    local_world_size: int,
    requests: RankStopRequests | None = None,
    progress: Progress | None = None,
) -> bool:
    """Train `run` on this rank, starting as `plan` says; `requests` knows who asks it to stop, `progress` who watches.

    True when the last step is done; False when a signal or the time limit stopped it earlier, after saving.
    """
    requests, progress = requests or RankStopRequests(), progress or Progress()
    progress.phase(records.CONNECTING if uses_trackers(run) else records.PREPARING)
    requests.limit_time(run.config.training.time_limit, run.config.training.time_margin)
    use_fork_timeout()
    nemo_logging.setLevel(logging.ERROR)
    if run.accelerator == "cpu":
        patches.apply(patches.NEMO_ON_CPU)
    paths = local_paths(run)
    chosen = run.kernels
    assert chosen, "run_rank refuses a run without kernels"
    if run.fp8 and run.accelerator == "gpu":
        check_device(emulates=run.config.training.fp8_emulation, has_experts=bool(run.model.num_experts))
    patches.apply_kernels(chosen)
    patches.apply_optimizer()

    recorder = begin_recorder(run, plan, chosen, requests) if rank == 0 else None
    if uses_trackers(run):
        progress.phase(records.PREPARING)
    loss_checks = [InitialLossCheck(run, recorder, rank=rank)] if plan.mode == WEIGHTS else []
    watchdog = DataLoaderWatchdog(run, recorder, progress)
    by_label = LossByLabel(run.dataset.labels, run.accelerator) if run.dataset.labels else None
    held_out = held_out_losses(run)
    model = build_model(run, chosen, wrap_data_step=watchdog.data_step, by_label=by_label, held_out=held_out)
    trainer = build_trainer(run, plan, local_world_size=local_world_size)
    router_load = RouterLoad(run) if run.model.num_experts else None
    guard, graphs = LossGuard(run, recorder, by_label, router_load, plan.skipped), UseCudaGraphs(chosen)
    trainer.callbacks = [
        ReportProgress(run, progress),
        SeedWeights(run.config.training.seed),
        VerifyRestoredState(plan),
        OptimizerSettings(run),
        *([BatchSizeWarmup(run)] if run.config.training.rampup_batch_size else []),
        guard,
        graphs,
        *loss_checks,
        *([Fp8Check(run, recorder)] if run.fp8 else []),
        Recording(run, plan, recorder, guard, graphs, held_out, by_label, router_load),
        StopEarly(requests),
        *trainer.callbacks,
        Evaluations(run, plan),
        Checkpoints(run, recorder, progress, saved_step=plan.step),
        watchdog,
        FreezeGC(),
        RollBack(recorder),
    ]
    # NeMo takes the limit of the first process group from it: while the dataset is indexed, other ranks wait.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(records.START_LIMIT_S)))
    pl.seed_everything(run.config.training.seed, workers=True, verbose=False)
    try:
        llm.pretrain(
            model=model,
            data=data_module(run, plan, paths, model.tokenizer),
            trainer=trainer,
            optim=build_optimizer(run),
            log=build_logger(run),
            resume=resume_settings(plan),
        )
        if recorder and trainer.global_step < run.max_steps:
            recorder.event("stopped", step=trainer.global_step)
    finally:
        kill_children()
        if recorder:
            recorder.close()
    # torchrun kills the first rank 30 s after another rank has ended, and a tracker's upload may take longer.
    torch.distributed.barrier()
    if trainer.global_step >= run.max_steps:
        return True
    saved = "saved" if trainer.global_step > plan.step else "with nothing new to save"
    log.warning("stopped after step %d of %d, %s", trainer.global_step, run.max_steps, saved)
    return False
