"""Runs the loop that `--module pkg:function` names, as a program of its own.

The function takes nothing and gives an object with `model`, `loader` and `optimizer`, and, if a batch isn't simply
given to the model, `step(batch)` that returns the loss (the optimizer's step is made here).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch


def load(name: str) -> Any:
    """The object that pkg:function makes. Raises ValueError for one that can't be trained."""
    module_name, _, function_name = name.partition(":")
    made = getattr(importlib.import_module(module_name), function_name)()
    for part in ("model", "loader", "optimizer"):
        if not hasattr(made, part):
            raise ValueError(f"{name} gives an object without .{part}; needed: model, loader and optimizer")
    return made


def run(parts: Any) -> None:
    """Train until the process is ended."""
    device = next(parts.model.parameters()).device
    step = getattr(parts, "step", None)
    while True:
        for batch in parts.loader:
            parts.optimizer.zero_grad()
            loss = step(batch) if step else _loss(parts.model, _moved(batch, device))
            loss.backward()
            parts.optimizer.step()


def _moved(batch: Any, device: torch.device) -> Any:
    if torch.is_tensor(batch):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(value, device) for value in batch)
    return batch


def _loss(model: Any, batch: Any) -> Any:
    output = (
        model(**batch)
        if isinstance(batch, dict)
        else model(*batch)
        if isinstance(batch, (list, tuple))
        else model(batch)
    )
    return output if torch.is_tensor(output) else output["loss"] if isinstance(output, dict) else output[0]


if __name__ == "__main__":
    run(load(sys.argv[1]))
