"""Proof, before the first step, that the state that was restored is the one that the start plan names."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from pretrainkit.engine.agreement import all_ranks_any
from pretrainkit.errors import CheckpointError
from pretrainkit.run.resume_plan import StartPlan

_MAX_NAMES = 8


class VerifyRestoredState(pl.Callback):
    """Raises CheckpointError, on every rank, when step, sample or any weight was not restored.

    Megatron builds a model with random weights and fills it afterwards. A tensor that is missing from the checkpoint,
    has another name there or is silently left out would be trained from its random values. So weights are NaN from
    before the load until they are loaded, which takes no memory.
    """

    def __init__(self, plan: StartPlan) -> None:
        self._plan = plan

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        load, restore = strategy.load_checkpoint, strategy.load_model_state_dict

        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                for parameter in strategy.megatron_parallel.parameters():
                    parameter.fill_(torch.nan)
            return load(*args, **kwargs)

        def load_model_state_dict(*args: Any, **kwargs: Any) -> Any:
            result = restore(*args, **kwargs)
            _check_weights(strategy.megatron_parallel)
            return result

        strategy.load_checkpoint, strategy.load_model_state_dict = load_checkpoint, load_model_state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plan = self._plan
        found = (trainer.global_step, trainer.datamodule.state_dict()["consumed_samples"])
        if found != (plan.step, plan.consumed_samples):
            raise CheckpointError(
                f"training would continue at step {found[0]} and sample {found[1]}",
                needed=f"step {plan.step} and sample {plan.consumed_samples}, as planned",
                action="this is a bug, or the files changed in between: start again",
                where=str(plan.checkpoint),
            )
        if plan.optimizer_state == "reset":
            # The fp32 copies of bf16 weights were made before the checkpoint's weights were loaded.
            for optimizer in trainer.strategy.optimizers:
                optimizer.reload_model_params()


def _check_weights(model: torch.nn.Module) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    if not all_ranks_any(bool(names)):
        return
    here = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    raise CheckpointError(
        f"weights that are NaN or were not in the checkpoint: {here or 'on other ranks'}",
        needed="a checkpoint with every weight of the model",
        action="convert the model again with tools/convert_checkpoint.py, or take an older checkpoint",
    )
