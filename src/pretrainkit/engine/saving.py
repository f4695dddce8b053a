"""Writing one checkpoint through NeMo, on all ranks together: in the background, with failures that every rank sees.

Megatron-core copies the state, then processes that each rank forks write it while training continues, and a
finalisation on all ranks writes the index. The first rank alone writes some small files, between collectives: if it
raised an error there, the others would wait for it forever. Such errors are kept until all ranks agree on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import operator
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
import psutil
import torch
from torch.distributed.checkpoint.api import CheckpointException

from pretrainkit.checkpoint.formats import nemo
from pretrainkit.checkpoint.formats.carried import carried_tensors, write_carried
from pretrainkit.checkpoint.formats.hf_files import HF_SOURCE, copy_description
from pretrainkit.config.resolve import VOCABULARY_MULTIPLE
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.agreement import all_ranks_any
from pretrainkit.engine.host_memory import HostMemory
from pretrainkit.megatron import patches
from pretrainkit.megatron.save_checksums import by_file
from pretrainkit.models.rope_change import trained_config
from pretrainkit.run.checkpoints import Checkpoint, commit
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.outcome import MIN_FREE_BYTES
from pretrainkit.units import format_bytes, format_duration, parse_duration

OPTIMIZER_PREFIX = "optimizer"
"""Prefix of the optimizer's tensors, and then of the files that hold only those."""
_POLL_S = 0.05
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PERMANENT = _DISK_FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG}
_ERRNO_IN_TEXT = re.compile(r"\[Errno (\d+)\]")


@dataclass(frozen=True)
class SaveFailure:
    """One failed attempt to write a checkpoint; every rank holds the same."""

    message: str
    errno: int | None = None
    """The failed system call's error number; None where something else failed."""

    @property
    def is_disk_full(self) -> bool:
        """Whether disk space or quota was exhausted, or the file was larger than allowed."""
        return self.errno in _DISK_FULL

    @property
    def is_permanent(self) -> bool:
        """Whether another attempt would fail for the same reason; I/O errors, stale NFS handles and the like pass."""
        return self.errno in _PERMANENT

    def advice(self, *, free_bytes: int, checkpoint_bytes: int | None) -> str:
        """What to do about it; `checkpoint_bytes` is the size of one checkpoint, if known."""
        if not self.is_disk_full:
            return "look at the file system and the log; the same command continues the run"
        size = "" if checkpoint_bytes is None else f", a checkpoint takes {format_bytes(checkpoint_bytes)}"
        return (
            f"free disk space or ask for more quota ({format_bytes(free_bytes)} are free{size}); --keep_last and "
            "--keep_optimizer_last keep fewer and smaller checkpoints, and one more than they keep must fit"
        )


def failure_of(error: BaseException, *, free_bytes: int | None = None) -> SaveFailure:
    """The failure that an error means: a system error among its causes or in its text, else the error itself.

    torch's archive writer names no system error; with less than MIN_FREE_BYTES free, a full disk is assumed.
    """
    number: int | None = None
    cause: BaseException | None = error
    while number is None and cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    if number is None and (match := _ERRNO_IN_TEXT.search(text)):
        number = int(match.group(1))
    if number is None and free_bytes is not None and free_bytes < MIN_FREE_BYTES:
        number = errno.ENOSPC
    name = "" if number is None else f"{errno.errorcode.get(number, number)} ({os.strerror(number)}): "
    lines = text.strip().splitlines() or [""]
    return SaveFailure(f"{name}{type(error).__name__}: {lines[-1].strip()}", number)


class Saver:
    """Begins and ends the writing of a checkpoint, one at a time. Every method is called on all ranks together."""

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run
        self._timeout_s = parse_duration(run.config.training.save_timeout)
        self._errors: list[BaseException] = []
        self._dead_before: dict[str, str] = {}
        self.current: Checkpoint | None = None
        """The checkpoint that is being written."""
        self.began_s = 0.0
        """Start of its writing by time.monotonic()."""
        self.copying_s = 0.0
        """How long training stood still for it, until its state was copied."""
        self._checksums: dict[str, dict[int, int]] = {}
        """Of what all ranks have written; on the first rank, once the writing is finalised."""
        patches.apply(patches.for_saving(self._keeping, self._finishing))
        # The queue's process imports the main script again: started early, it doesn't delay the first save.
        self._queue_start = threading.Thread(target=filesystem_async._get_write_results_queue, daemon=True)
        if run.accelerator == "gpu":  # on CPU it is forked (megatron.patches), which takes no time
            self._queue_start.start()
        self.memory = HostMemory(run)

    def begin(self, trainer: pl.Trainer) -> SaveFailure | None:
        """Copy the state of this step and start to write it; None when that succeeded."""
        assert self.current is None
        self.began_s = time.monotonic()
        if self._queue_start.is_alive():
            self._queue_start.join()
        self.memory.wait()
        folder = RunFolder.of(self._run).checkpoint(trainer.global_step)
        with self._kept():
            if trainer.is_global_zero:
                shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
                (folder / "weights").mkdir(parents=True)
                # Before the writers start: on ext4 and others a flush of small files waits for all that they write.
                self._write_context(folder)
        if failure := self._agreed():
            if trainer.is_global_zero:
                shutil.rmtree(folder, ignore_errors=True)  # a full disk needs the space
            return failure
        training, dataset = self._run.config.training, self._run.dataset
        self.current = Checkpoint(
            folder,
            step=trainer.global_step,
            consumed_samples=trainer.datamodule.state_dict()["consumed_samples"],
            global_batch_size=training.global_batch_size,
            rampup_batch_size=training.rampup_batch_size,
            optimizer_was_reset=training.reset_optimizer,
            dataset={
                "weights": dataset.weights,
                "data_hash": dataset.data_hash,
                "schedule": [dataclasses.asdict(change) for change in dataset.schedule],
            },
        )
        if training.keep_optimizer_last:
            _separate_optimizer(trainer)
        # NeMo removes the suffix: its checkpoints are folders.
        trainer.save_checkpoint(f"{folder}.ckpt", storage_options={"finalize_fn": lambda: None})
        if failure := self._agreed():
            self.end(trainer, wait=True, failure=failure)
            return failure
        self.copying_s = time.monotonic() - self.began_s
        return None

    def end(
        self, trainer: pl.Trainer, *, wait: bool, failure: SaveFailure | None = None
    ) -> tuple[bool, SaveFailure | None]:
        """Whether the writing has ended, which `wait` waits for, and the failure if it failed.

        Without a failure the checkpoint is complete and has its commit mark. `failure`: an earlier one of this save.
        """
        save = self.current
        assert save
        while not self._finalised(trainer):
            if not wait:
                return False, None
            time.sleep(_POLL_S)
        with self._kept():
            if trainer.is_global_zero and not self._errors and not failure:
                commit(save, self._checksums)
        failure = self._agreed() or failure
        self.current = None
        if failure and trainer.is_global_zero:
            shutil.rmtree(save.path, ignore_errors=True)  # a full disk needs the space
        return True, failure

    def _finalised(self, trainer: pl.Trainer) -> bool:
        if writer := _live_writer(trainer):
            problem: OSError | None = None
            # A child that was killed because it didn't start (`child_processes`) is a zombie for an instant.
            dead, before = _dead_children(writer), self._dead_before
            self._dead_before = dead
            if lost := next((how for pid, how in dead.items() if pid in before), ""):
                problem = ChildProcessError(lost)
            elif time.monotonic() - self.began_s > self._timeout_s:
                problem = TimeoutError(f"writing took longer than {format_duration(self._timeout_s)}")
            if problem:
                _kill(writer)
                self._errors.append(problem)
        try:
            trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=False)
            # None is left either if NeMo has waited for it already, as it does where a model is one of modelopt's.
            return not _unfinished(trainer)
        except CheckpointException as error:  # raised on all ranks; only the first one's names the cause
            if trainer.is_global_zero:
                self._errors.append(error)
            return True

    def _write_context(self, folder: Path) -> None:
        """Write what NeMo and this project need next to the weights, as conversion does."""
        hf_folder = Path(self._run.hf_folder)
        config = trained_config(hf_folder, self._run.config)
        nemo.write_context(
            folder / "context",
            self._run.model,
            torch.bfloat16 if self._run.precision == "bf16" else torch.float32,
            hf_folder,
            config=config,
            vocabulary_divisor=VOCABULARY_MULTIPLE,
            # NeMo's default fails to load where Transformer Engine is not installed.
            further={"apply_rope_fusion": False},
        )
        copy_description(hf_folder, folder / HF_SOURCE, config=config)
        write_carried(folder / HF_SOURCE, carried_tensors(hf_folder))

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep an error for `_agreed`, in place of raising it on one rank alone."""
        try:
            yield
        except Exception as error:
            self._errors.append(error)

    def _keeping(self, function: Callable[..., Any]) -> Callable[..., None]:
        def keep(*args: Any, **kwargs: Any) -> None:
            with self._kept():
                function(*args, **kwargs)

        return keep

    def _finishing(self, function: Callable[..., Any]) -> Callable[..., None]:
        def finish(writer: Any, metadata: Any, results: Any) -> None:
            self._checksums = {f"weights/{name}": parts for name, parts in by_file(results).items()}
            function(writer, metadata, results)

        return self._keeping(finish)

    def _agreed(self) -> SaveFailure | None:
        """The failure of any rank since the last call, the same on all; the first rank's comes first.

        Megatron's own errors come last: it raises them on the first rank for a failure on any.
        """
        errors, self._errors = self._errors, []
        if not all_ranks_any(bool(errors)):
            return None
        free_bytes = shutil.disk_usage(self._run.experiment_dir).free
        own = [(isinstance(error, CheckpointException), failure_of(error, free_bytes=free_bytes)) for error in errors]
        of_ranks: list[list[tuple[bool, SaveFailure]]] = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(of_ranks, own)
        return min(itertools.chain.from_iterable(of_ranks), key=operator.itemgetter(0))[1]


def _separate_optimizer(trainer: pl.Trainer) -> None:
    """Write the optimizer's state to files that hold nothing else, so that they can be removed from the checkpoint."""
    strategy = trainer.strategy.unwrapped_checkpoint_io.save_sharded_strategy
    strategy = getattr(strategy, "base_strategy", strategy)
    if strategy.separation_hint is None:
        strategy.separation_hint = OPTIMIZER_PREFIX
        strategy.thread_count *= 2  # half of the writers get the optimizer's state, the larger part


def _unfinished(trainer: pl.Trainer) -> list[Any]:
    """What Megatron has yet to finalise: at most the one save that is being written."""
    return list(trainer.strategy.checkpoint_io.async_calls_queue.async_calls)


def _live_writer(trainer: pl.Trainer) -> Any:
    """This rank's writer process, if it runs; its children write the files."""
    processes = (call.async_caller.process for call in _unfinished(trainer))
    return next((process for process in processes if process is not None and process.is_alive()), None)


def _dead_children(writer: Any) -> dict[str, str]:
    """How children of the writer failed, by process id. Megatron's writer would wait for their results forever."""
    dead = {}
    with contextlib.suppress(OSError):  # it has just ended
        for child in Path(f"/proc/{writer.pid}/task/{writer.pid}/children").read_text().split():
            # proc(5): the state comes after the name in brackets, the exit status last, until the writer asks for it.
            state, *_, status = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            if state == "Z" and (code := os.waitstatus_to_exitcode(int(status))):
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
                dead[child] = f"a process that writes files {how}"
    return dead


def _kill(writer: Any) -> None:
    for child in psutil.Process(writer.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    writer.kill()
    writer.join()
