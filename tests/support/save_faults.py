"""Ranks whose file system fails, or is slow, while they save: faults are put into the calls that write files."""

from __future__ import annotations

import builtins
import os
import signal
import time
from pathlib import Path
from typing import Any

import ranks

from pretrainkit.checkpoint.formats import nemo

SHARDS, COMMON, INDEX, CONTEXT = "shards", "common.pt", ".metadata", "context"
"""Where a fault is: in files of every rank, or in those of the first rank."""
KILLED, LOST, STUCK = "killed", "lost", "stuck"
"""The same in processes: the one that writes, one of its children, or one of them that never ends."""
FINALISED = "finalised"
"""No fault of the writing: something else in the rank waits for the save."""


def train_with_faults(
    rank: int,
    world_size: int,
    *,
    run_file: Path,
    where: str = SHARDS,
    number: int = 0,
    folder: str = "step_",
    faulty_rank: int = 0,
    times: Path | None = None,
    delay_s: float = 0.0,
) -> None:
    """`ranks.train_until_stopped`, with system error `number` on one rank for as long as `times` holds files.

    Only checkpoints whose folder begins with `folder` are concerned; shards are written `delay_s` late.
    """

    def fail(path: Any) -> None:
        if rank != faulty_rank or folder not in str(path) or times is None:
            return
        for token in sorted(times.iterdir()):
            token.unlink()
            if where == KILLED:
                os.kill(os.getppid(), signal.SIGKILL)
            if where == LOST:
                os.kill(os.getpid(), signal.SIGKILL)
            if where == STUCK:
                time.sleep(3600)
            raise OSError(number, os.strerror(number), str(path))

    _put_into_megatron(where, fail, delay_s)
    if where == FINALISED:
        import nemo.collections.llm.modelopt.model_utils as model_utils

        model_utils.save_modelopt_state = lambda *all: all[2].maybe_finalize_save_checkpoint(blocking=True)
    ranks.train_until_stopped(rank, world_size, run_file=run_file)


def _put_into_megatron(where: str, fail: Any, delay_s: float) -> None:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

    def open_shard(path: Any, *arguments: Any, **settings: Any) -> Any:
        time.sleep(delay_s)
        if where in (SHARDS, KILLED, LOST, STUCK):
            fail(path)
        return builtins.open(path, *arguments, **settings)  # noqa: PTH123  as Megatron calls it

    def failing(function: Any, path_of: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            fail(path_of(*arguments))
            return function(*arguments, **settings)

        return call

    filesystem_async.open = open_shard
    if where == COMMON:
        TorchCommonSaveStrategy.save_common = failing(TorchCommonSaveStrategy.save_common, lambda *all: all[2])
    if where == INDEX:
        writer = filesystem_async.FileSystemWriterAsync
        writer.finish = failing(writer.finish, lambda self, *_: self.checkpoint_dir)
    if where == CONTEXT:
        nemo.write_context = failing(nemo.write_context, lambda path, *_: path)
