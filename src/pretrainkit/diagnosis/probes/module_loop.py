"""Runs the loop that `--module pkg:function` names, as a program of its own.

The function takes nothing and gives an object with `model`, `loader` and `optimizer`, and, if a batch isn't simply
given to the model, `step(batch)` that returns the loss (the optimizer's step is made here).
"""

from __future__ import annotations

import importlib
import sys
from operator import methodcaller
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


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
    step, move = getattr(parts, "step", None), methodcaller("to", device, non_blocking=True)
    while True:
        for batch in parts.loader:
            parts.optimizer.zero_grad()
            loss = step(batch) if step else _loss(parts.model, tree_map_only(torch.Tensor, move, batch))
            loss.backward()
            parts.optimizer.step()


def _loss(model: Any, batch: Any) -> Any:
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (list, tuple)) else model(batch)
    return output if torch.is_tensor(output) else output["loss"] if isinstance(output, dict) else output[0]


if __name__ == "__main__":
    run(load(sys.argv[1]))
