"""Ranks whose file system fails, or is slow, while they save: faults are put into the calls that write files."""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import ranks

SHARDS, COMMON, INDEX, CONTEXT = "shards", "common.pt", ".metadata", "context"
"""Where a fault is: in files of every rank, or in those of the first rank."""
KILLED, LOST, STUCK = "killed", "lost", "stuck"
"""The same in processes: the one that writes, one of its children, or one of them that never ends."""
MESSENGER_KILLED, MESSENGER_STUCK = "messenger killed", "messenger stuck"
"""And in the one that passes on what writers have written."""
REAPED, FINALISED = "reaped", "finalised"
"""No fault of the writing: something else in the rank waits for every child, or for the save."""


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

    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    messengers: list[int] = []
    messenger = filesystem_async._get_write_results_queue

    def noted_messenger() -> Any:
        queue = messenger()
        messengers.append(queue._manager._process.pid)
        return queue

    filesystem_async._get_write_results_queue = noted_messenger

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
            if where in (MESSENGER_KILLED, MESSENGER_STUCK):
                number_of = signal.SIGKILL if where == MESSENGER_KILLED else signal.SIGSTOP
                os.kill(messengers[-1], number_of)
                return
            raise OSError(number, os.strerror(number), str(path))

    _put_into_megatron(where, fail, delay_s)
    if where == REAPED:
        signal.signal(signal.SIGCHLD, _reap)
    if where == FINALISED:
        import nemo.collections.llm.modelopt.model_utils as model_utils

        model_utils.save_modelopt_state = lambda *all: all[2].maybe_finalize_save_checkpoint(blocking=True)
    ranks.train_until_stopped(rank, world_size, run_file=run_file)


def _put_into_megatron(where: str, fail: Any, delay_s: float) -> None:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
    from nemo.lightning.io.pl import TrainerContext

    def open_shard(path: Any, *arguments: Any, **settings: Any) -> Any:
        time.sleep(delay_s)
        if where in (SHARDS, KILLED, LOST, STUCK, MESSENGER_KILLED, MESSENGER_STUCK):
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
        TrainerContext.io_dump = failing(TrainerContext.io_dump, lambda self, path: path)


def _reap(*_: Any) -> None:
    """What MPI's libraries do when a child ends."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
