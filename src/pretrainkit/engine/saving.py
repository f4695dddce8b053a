"""Writing one checkpoint through NeMo, on all ranks together: in the background, with failures that every rank sees.

Megatron-core copies the state, then processes that each rank forks write it while training goes on, and a
finalisation on all ranks writes the index. Some small files are written by the first rank alone, between
collectives; were it to fail there by itself, the others would wait for it for ever. So such errors are kept until
all ranks meet.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import megatron.core.dist_checkpointing.serialization as serialization
import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
import psutil
import torch
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.lightning.io.artifact.file import DirArtifact
from nemo.lightning.io.pl import TrainerContext
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from pretrainkit.checkpoint.formats.hf_files import save_hf_source
from pretrainkit.checkpoint.formats.nemo import TOKENIZER_FOLDER, copy_tokenizer
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.save_failures import SaveFailure, failure_of
from pretrainkit.logs import get_logger
from pretrainkit.run import checkpoints
from pretrainkit.run.folder import RunFolder
from pretrainkit.units import format_duration, parse_duration

_POLL_S = 0.05
OPTIMIZER_PREFIX = "optimizer"
"""Names of the optimizer's tensors, and then of the files that hold them alone, begin with it."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Save:
    """A checkpoint that is being written."""

    folder: Path
    step: int
    consumed_samples: int
    began_s: float
    """By time.monotonic()."""


class TokenizerFiles(DirArtifact):
    """A model folder's tokenizer in a checkpoint's context. NeMo's own way copies the folder's weights, too."""

    def dump(self, instance: Any, value: str, absolute_dir: Path, relative_dir: Path) -> str:
        copy_tokenizer(Path(value), Path(absolute_dir) / relative_dir / TOKENIZER_FOLDER)
        return str(Path(relative_dir) / TOKENIZER_FOLDER)


class Saver:
    """Begins and ends the writing of a checkpoint, one at a time. Every method is called on all ranks together."""

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run
        self._timeout_s = parse_duration(run.config.training.save_timeout)
        self._errors: list[BaseException] = []
        self.current: Save | None = None
        AutoTokenizer.__io_artifacts__ = [TokenizerFiles("pretrained_model_name")]
        # Its process imports the main script again: begun now, beside the start, the first save needn't wait for it.
        self._queue_start = threading.Thread(target=filesystem_async._get_write_results_queue, daemon=True)
        if run.accelerator == "gpu":  # on CPU it is a fork (cpu.py), which takes no time and wants no other threads
            self._queue_start.start()

    def begin(self, trainer: pl.Trainer) -> SaveFailure | None:
        """Copy the state of this step and let it be written; None when that goes on."""
        assert self.current is None
        if self._queue_start.is_alive():
            self._queue_start.join()
        folder = RunFolder.of(self._run).checkpoint(trainer.global_step)
        with self._kept():
            if trainer.is_global_zero:
                shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
                (folder / "weights").mkdir(parents=True)
        if failure := self._agreed(trainer):
            return failure
        self.current = Save(
            folder, trainer.global_step, trainer.datamodule.state_dict()["consumed_samples"], time.monotonic()
        )
        if self._run.config.training.keep_optimizer_last:
            _separate_optimizer(trainer)
        with self._kept_in_megatron():
            # NeMo takes the suffix off again: its checkpoints are folders.
            trainer.save_checkpoint(f"{folder}.ckpt", storage_options={"finalize_fn": lambda: None})
        with self._kept():
            if trainer.is_global_zero:
                TrainerContext.from_trainer(trainer).io_dump(folder / "context", yaml_attrs=["model"])
                save_hf_source(Path(self._run.hf_folder), folder)
        if failure := self._agreed(trainer):
            self.end(trainer, wait=True, failure=failure)
            return failure
        return None

    def end(
        self, trainer: pl.Trainer, *, wait: bool, failure: SaveFailure | None = None
    ) -> tuple[bool, SaveFailure | None]:
        """Whether the writing has come to its end, with `wait` at any rate, and how it failed if it did.

        Without a failure the checkpoint is complete: its commit mark is there. `failure`: what has failed before.
        """
        save = self.current
        assert save
        while not self._finalised(trainer, save):
            if not wait:
                return False, None
            time.sleep(_POLL_S)
        with self._kept():
            if trainer.is_global_zero and not self._errors and not failure:
                self._commit(save)
        failure = self._agreed(trainer) or failure
        self.current = None
        if failure and trainer.is_global_zero:
            shutil.rmtree(save.folder, ignore_errors=True)  # a full disk needs the room
        return True, failure

    def _finalised(self, trainer: pl.Trainer, save: Save) -> bool:
        _forget_reaped_writer(trainer)
        if lost := _lost_writer(trainer):
            _kill_writers(trainer)
            self._errors.append(ChildProcessError(lost))
        if time.monotonic() - save.began_s > self._timeout_s and _kill_writers(trainer):
            _end_results_queue()  # it may be what the writer waited for
            self._errors.append(TimeoutError(f"writing took longer than {format_duration(self._timeout_s)}"))
        try:
            with self._kept_in_megatron():
                trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=False)
                # None is left either if NeMo has waited for it, as it does where a model is one of modelopt's.
                return not _unfinished(trainer)
        except CheckpointException as error:  # on all ranks; it tells the first one why
            if trainer.is_global_zero:
                self._errors.append(error)
            return True

    def _commit(self, save: Save) -> None:
        training, dataset = self._run.config.training, self._run.dataset
        checkpoint = checkpoints.Checkpoint(
            save.folder,
            step=save.step,
            consumed_samples=save.consumed_samples,
            global_batch_size=training.global_batch_size,
            optimizer_was_reset=training.reset_optimizer,
            dataset={"weights": dataset.weights, "data_hash": dataset.data_hash},
        )
        checkpoints.commit(checkpoint)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep what goes wrong inside for `_agreed`, in place of raising it on one rank alone."""
        try:
            yield
        except Exception as error:
            self._errors.append(error)

    @contextlib.contextmanager
    def _kept_in_megatron(self) -> Iterator[None]:
        """The same where Megatron writes files on the first rank alone, or a rank can't learn what was written."""
        with contextlib.ExitStack() as stack:
            for owner, name, changed in (
                (TorchCommonSaveStrategy, "save_common", self._keeping),
                (FileSystemWriterAsync, "finish", self._keeping),
                (serialization, "save_config", self._keeping),
                (FileSystemWriterAsync, "retrieve_write_results", _results_or_failure),
            ):
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, changed(original))
            yield

    def _keeping(self, function: Callable[..., Any]) -> Callable[..., None]:
        def keep(*args: Any, **kwargs: Any) -> None:
            with self._kept():
                function(*args, **kwargs)

        return keep

    def _agreed(self, trainer: pl.Trainer) -> SaveFailure | None:
        """What went wrong on any rank since the last time, the same on all; the first rank's word goes first.

        But Megatron's errors go last: it raises them on the first rank for what has failed on any.
        """
        errors, self._errors = self._errors, []
        failed = torch.tensor([bool(errors)], dtype=torch.int32, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(failed, op=torch.distributed.ReduceOp.MAX)
        if not failed.item():
            return None
        free_bytes = shutil.disk_usage(self._run.experiment_dir).free
        own = [(isinstance(error, CheckpointException), failure_of(error, free_bytes=free_bytes)) for error in errors]
        of_ranks: list[list[tuple[bool, SaveFailure]]] = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(of_ranks, own)
        return min(itertools.chain.from_iterable(of_ranks), key=operator.itemgetter(0))[1]


def _separate_optimizer(trainer: pl.Trainer) -> None:
    """Let the optimizer's state lie in files of its own, so that it can be left out later without writing the rest."""
    strategy = trainer.strategy.unwrapped_checkpoint_io.save_sharded_strategy
    strategy = getattr(strategy, "base_strategy", strategy)
    if strategy.separation_hint is None:
        strategy.separation_hint = OPTIMIZER_PREFIX
        strategy.thread_count *= 2  # as many writers as before for the optimizer's state, the larger part


def _results_or_failure(retrieve: Callable[[FileSystemWriterAsync], Any]) -> Callable[[FileSystemWriterAsync], Any]:
    """What a rank's writer has written; an error that Megatron tells the other ranks where that can't be asked."""

    def results(writer: FileSystemWriterAsync) -> Any:
        try:
            return retrieve(writer)
        except (OSError, EOFError) as error:  # the process that passes it on has died
            _end_results_queue()
            return _wrap_exception(error)

    return results


def _end_results_queue() -> None:
    """End the process that passes on what writers have written: the next save starts another."""
    queue, filesystem_async._results_queue = filesystem_async._results_queue, None
    if queue is not None:
        queue._manager._process.kill()


def _live_writer(trainer: pl.Trainer) -> Any:
    """This rank's process that writes, if it still does; the files are written by its children."""
    processes = (call.async_caller.process for call in _unfinished(trainer))
    return next((process for process in processes if process is not None and process.is_alive()), None)


def _unfinished(trainer: pl.Trainer) -> list[Any]:
    """What Megatron has yet to finalise: at most the one save that is being written."""
    return list(trainer.strategy.checkpoint_io.async_calls_queue.async_calls)


def _forget_reaped_writer(trainer: pl.Trainer) -> None:
    """Let Megatron go on where something else in this process has waited for the writer, as MPI's libraries do.

    Python takes such a process for alive for ever. How it ended is told by its results, which Megatron reads next.
    """
    for call in _unfinished(trainer):
        process = call.async_caller.process
        if process is not None and process.is_alive():
            try:
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                call.async_caller.process = None


def _lost_writer(trainer: pl.Trainer) -> str:
    """How one of the processes that write files ended before its work, in words; empty if none did.

    Their parent, which is Megatron's, would wait for its answer for ever.
    """
    writer = _live_writer(trainer)
    if writer is None:
        return ""
    with contextlib.suppress(OSError):  # it has just ended, or the kernel doesn't tell
        for child in Path(f"/proc/{writer.pid}/task/{writer.pid}/children").read_text().split():
            # State first and status last, as waitpid would give it to the parent: see proc(5).
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z" and (code := os.waitstatus_to_exitcode(int(fields[-1]))):
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
                return f"a process that writes files {how}"
    return ""


def _kill_writers(trainer: pl.Trainer) -> bool:
    """Kill this rank's process that writes, and its children; whether there was one alive."""
    writer = _live_writer(trainer)
    if writer is None:
        return False
    for child in psutil.Process(writer.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    writer.kill()
    writer.join()
    return True
