"""Proof that every weight of a model came from its checkpoint: until then it is NaN.

Engines build a model with random weights and fill it afterwards. Where a tensor is missing from the checkpoint, named
otherwise or left out in silence, the random one would be trained.
"""

from __future__ import annotations

from typing import Any

import torch

from pretrainkit.errors import CheckpointError

_SHOWN = 8


def watch(strategy: Any) -> None:
    """Make a (NeMo) strategy refuse to go on when loading a checkpoint has left a weight as it was built.

    It raises CheckpointError on every rank. Costs no memory: the random weights are overwritten with NaN before the
    load, and looked for after it.
    """
    load, restore = strategy.load_checkpoint, strategy.load_model_state_dict

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        forget(strategy.megatron_parallel)
        return load(*args, **kwargs)

    def load_model_state_dict(*args: Any, **kwargs: Any) -> Any:
        result = restore(*args, **kwargs)
        _check_all_ranks(strategy.megatron_parallel, strategy.root_device)
        return result

    strategy.load_checkpoint, strategy.load_model_state_dict = load_checkpoint, load_model_state_dict


@torch.no_grad()
def forget(model: torch.nn.Module) -> None:
    """Overwrite every weight with NaN."""
    for parameter in model.parameters():
        parameter.fill_(torch.nan)


@torch.no_grad()
def not_restored(model: torch.nn.Module) -> list[str]:
    """Names of weights that hold a NaN."""
    return [name for name, parameter in model.named_parameters() if parameter.isnan().any()]


def _check_all_ranks(model: torch.nn.Module, device: torch.device) -> None:
    names = not_restored(model)
    count = torch.tensor([len(names)], device=device)
    torch.distributed.all_reduce(count)
    if not count.item():
        return
    here = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    raise CheckpointError(
        f"weights that are NaN or were not in the checkpoint: {here or 'on other ranks'}",
        needed="a checkpoint with every weight of the model",
        action="convert the model again with tools/convert_checkpoint.py, or take an older checkpoint",
    )
