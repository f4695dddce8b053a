"""One rank of a program that is being diagnosed: knows its state, and follows the plan step by step."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from pretrainkit.diagnosis.observe import batches, states
from pretrainkit.diagnosis.observe.loop import Loop
from pretrainkit.diagnosis.observe.phases import PhaseClock
from pretrainkit.diagnosis.observe.streams import Stream
from pretrainkit.diagnosis.spec import Spec

Plan = Generator[None, dict[str, float], None]
"""Is sent the phases of each step."""
MANY_BACKWARD_PASSES = 200
"""So many without a step of an optimizer are more than gradient accumulation makes."""
LARGEST_SET_BYTES = 2 << 30
"""Memory that batches kept for replaying may take."""


class Session:
    """The state of one rank under diagnosis; what the hooks call and the probes change."""

    def __init__(self, spec: Spec, follow: Callable[[Session], Plan]) -> None:
        """`follow` begins the measurements, with the first step."""
        self.spec, self._follow = spec, follow
        self._folder = Path(spec.folder)
        self.largest_set_bytes = LARGEST_SET_BYTES
        self.clock = PhaseClock()
        self.loop = Loop()
        self.notes: list[str] = []
        self.last_loader: Any = None
        self.epochs_begun = 0
        self.observed: dict[str, float] = {}
        """Share of each phase in the time, as it was seen in one window."""
        self.attention_kinds: dict[str, int] = {}
        """Attention implementation -> calls in a profile of the loop."""
        self.seen_modules: list[Any] = []
        self.stop_looking_for_modules: Callable[[], None] = lambda: None
        self.is_watching_reads = False
        # What probes switch:
        self.source: Iterator[Any] | None = None
        self.attention_context: Callable[[], Any] = contextlib.nullcontext
        # Of the window that is measured:
        self.recorded: list[Any] | None = None
        self.measure_batches = False
        self.special_ids: dict[str, int | None] = {"eos_id": None, "bos_id": None}
        """Of the program's tokenizer, if it has one."""
        self.batch_facts: list[dict[str, Any]] = []
        self.micro_batches = 0
        self.step = 0
        self._main_thread = threading.get_ident()
        self._backward_passes = self._backward_since_step = 0
        self._plan: Plan | None = None
        self._result: dict[str, Any] = {}
        self._is_over = False
        self._ends_by_itself = False
        """It was asked to save and to end."""

    # What the hooks call

    def is_main_thread(self) -> bool:
        """Whether the caller runs where the loop does."""
        return threading.get_ident() == self._main_thread

    def stream(self, loader: Any, make_iterator: Callable[[], Any]) -> Stream:
        """What the loop gets for iter(loader)."""
        from pretrainkit.diagnosis.observe import hooks

        hooks.install_late(self)
        return Stream(self, loader, make_iterator)

    def got(self, batch: Any) -> None:
        """The loop was given a batch to train on."""
        self.micro_batches += 1
        if self.recorded is not None and batches.num_bytes(self.recorded) < self.largest_set_bytes:
            self.recorded.append(batches.copied(batch))
        if self.measure_batches:
            with self.clock.phase("data"):
                self.batch_facts.append(batches.measure(batch) | batches.special_tokens(batch, **self.special_ids))

    def before_backward(self) -> None:
        """A backward pass begins. The thread of the first one is the loop's."""
        if not self._backward_passes:
            self._main_thread = threading.get_ident()
            self.clock.charge_this_thread()
        self._backward_passes += 1
        if self._backward_passes == MANY_BACKWARD_PASSES and self._plan is None:
            states.write(self._folder, states.NO_OPTIMIZER)
        if self.is_main_thread():
            self._backward_since_step += 1
            if self.last_loader is not None and self.loop.loader is None:
                self.loop.loader = self.last_loader

    def before_optimizer(self, optimizer: Any) -> None:
        """An optimizer begins its step."""
        if not any(known is optimizer for known in self.loop.optimizers):
            self.loop.optimizers.append(optimizer)

    def after_optimizer(self, optimizer: Any) -> None:
        """The first optimizer that steps after a backward pass ends a step of the loop."""
        if not self._backward_since_step or self._is_over or not self.is_main_thread():
            return
        spent = self.clock.end_step()
        spent["backward_passes"] = self._backward_since_step
        self._backward_since_step = 0
        self.step += 1
        if self._plan is None:
            if not states.claim(self._folder, self.rank):
                states.write(self._folder, states.SECOND)
                self._is_over = True
                return
            states.write(self._folder, states.MEASURED)
            self._plan = self._follow(self)
            next(self._plan)
        try:
            self._plan.send(spent)
        except StopIteration:
            self._is_over = True
            self.finish()
        self.clock.end_step()

    # What the plan calls

    @property
    def rank(self) -> int:
        """Of this process."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return int(torch.distributed.get_rank())
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        """Ranks in all; mp.spawn's are known by their process group alone."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return int(torch.distributed.get_world_size())
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def num_cpus(self) -> int:
        """This rank's part of the machine's cores."""
        return max(1, self.spec.num_cpus // self.world_size)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        for module in self.seen_modules:
            for parameter in module.parameters():
                return parameter.device
        return torch.device("cpu")

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a CUDA device."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def write(self, **parts: Any) -> None:
        """Add to this rank's result and put it on disk whole."""
        self._result |= {"rank": self.rank, "world_size": self.world_size, "host": socket.gethostname(), **parts}
        path = self._folder / f"rank_{self.rank}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._result, default=str), encoding="utf-8")
        temporary.replace(path)

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        if self.world_size == 1 or not torch.distributed.is_initialized():
            return value
        with self.clock.phase("other"):
            values = [value]
            device = self.device if torch.distributed.get_backend() == "nccl" else None
            torch.distributed.broadcast_object_list(values, src=0, device=device)
        return values[0]

    def mark(self, probe: str) -> None:
        """Say which change is being tried, so that a program that it breaks tells."""
        (self._folder / f"trying_{self.rank}").write_text(probe, encoding="utf-8")

    def show_progress(self, text: str) -> None:
        """Say what is being measured."""
        if self.rank == 0:
            temporary = self._folder / "progress.tmp"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._folder / "progress")

    def time_the_checkpoint(self) -> None:
        """Ask a run of this project to save and end, and write down how long saving took."""
        self.clock.end_step()
        atexit.register(lambda: self.write(checkpoint_s=self.clock.end_step().get("checkpoint", 0.0)))
        self._ends_by_itself = True
        os.kill(os.getpid(), signal.SIGTERM)

    def finish(self) -> None:
        """Say that all is measured, and wait to be ended: a rank that returned would let others fail."""
        self.write(ended=True, notes=self.notes)
        if not self._ends_by_itself:
            (self._folder / f"ended_{self.rank}_{self.world_size}").touch()
            parent = os.getppid()
            while os.getppid() == parent:
                time.sleep(1)
            os._exit(0)
