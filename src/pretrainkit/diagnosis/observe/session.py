"""One rank of a program that is being diagnosed: what is known of its loop, and its part in the plan, step by step."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from pretrainkit.diagnosis.observe import batches
from pretrainkit.diagnosis.observe.phases import OTHER, PhaseClock
from pretrainkit.diagnosis.observe.sampler import own_frames
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
        self.clock = PhaseClock()
        self.notes: list[str] = []
        # What the hooks have seen of the loop:
        self.last_loader: Any = None
        self.loader: Any = None
        """The DataLoader whose batches are trained on."""
        self.optimizers: list[Any] = []
        self.modules: list[Any] = []
        """The outermost ones."""
        self.stop_looking_for_modules: Callable[[], None] = lambda: None
        self.attention = self.attention_dtype = ""
        """The kernel that torch chooses for scaled_dot_product_attention; empty where it isn't called."""
        self.reads: Counter[str] | None = None
        """'what at file:line' -> how often the loop's own code read a tensor's value or printed, while watched."""
        self.observed: dict[str, float] = {}
        """Share of each phase in the time, as it was seen in one window."""
        # What probes switch:
        self.source: Iterator[Any] | None = None
        self.attention_context: Callable[[], Any] = contextlib.nullcontext
        # Of the window that is measured:
        self.recorded: list[Any] | None = None
        self.micro_batches = self.backward_passes = 0
        self._main_thread = threading.get_ident()
        self._all_backward_passes = self._backward_since_step = 0
        self._plan: Plan | None = None
        self._result: dict[str, Any] = {}
        self._is_over = False

    # What the hooks call

    def is_main_thread(self) -> bool:
        """Whether the caller runs where the loop does."""
        return threading.get_ident() == self._main_thread

    def got(self, batch: Any) -> None:
        """The loop was given a batch to train on."""
        self.micro_batches += 1
        if self.recorded is not None and batches.num_bytes(self.recorded) < LARGEST_SET_BYTES:
            self.recorded.append(batches.copied(batch))

    def saw_read(self, what: str) -> None:
        """A value was read or something printed; noted if the user's code did it, outside the phases."""
        if self.reads is None or self.clock.current != OTHER or not self.is_main_thread():
            return
        if frames := own_frames(sys._getframe(2)):
            self.reads[f"{what} at {frames[-1].f_code.co_filename}:{frames[-1].f_lineno}"] += 1

    def before_backward(self) -> None:
        """A backward pass begins. The thread of the first one is the loop's."""
        if not self._all_backward_passes:
            self._main_thread = threading.get_ident()
            self.clock.charge_this_thread()
        self._all_backward_passes += 1
        if self._all_backward_passes == MANY_BACKWARD_PASSES and self._plan is None:
            self._is_not_measured("many backward passes, but no step() of a torch optimizer")
        if self.is_main_thread():
            self._backward_since_step += 1
            if self.loader is None:
                self.loader = self.last_loader

    def after_optimizer(self, optimizer: Any) -> None:
        """The first optimizer that steps after a backward pass ends a step of the loop."""
        if not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)
        if not self._backward_since_step or self._is_over or not self.is_main_thread():
            return
        spent = self.clock.end_step()
        self.backward_passes += self._backward_since_step
        self._backward_since_step = 0
        if self._plan is None:
            try:
                (self._folder / f"claimed_{self.rank}").touch(exist_ok=False)
            except FileExistsError:
                self._is_not_measured("it trains next to one of the same rank, which is measured")
                self._is_over = True
                return
            self._plan = self._follow(self)
            next(self._plan)
        try:
            self._plan.send(spent)
        except StopIteration:
            self._is_over = True
            self._finish()
        self.clock.end_step()

    def _is_not_measured(self, why: str) -> None:
        words = " ".join(sys.orig_argv)[:200]
        self._put(f"unmeasured_{os.getpid()}", f"process {os.getpid()} ({words}): {why}")

    def _finish(self) -> None:
        """Say that all is measured, and wait to be ended: a rank that returned would let others fail."""
        self.write(ended=True, notes=self.notes)
        (self._folder / f"ended_{self.rank}_{self.world_size}").touch()
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

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
    def on_gpu(self) -> bool:
        """Whether the model is on a CUDA device."""
        return self._device().type == "cuda"

    def _device(self) -> torch.device:
        parameters = (parameter for module in self.modules for parameter in module.parameters())
        first = next(parameters, None)
        return torch.device("cpu") if first is None else first.device

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def write(self, **parts: Any) -> None:
        """Add to this rank's result and put it on disk whole."""
        self._result |= {"rank": self.rank, "world_size": self.world_size, "host": socket.gethostname(), **parts}
        self._put(f"rank_{self.rank}.json", json.dumps(self._result, default=str))

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        if self.world_size == 1 or not torch.distributed.is_initialized():
            return value
        with self.clock.phase(OTHER):
            values = [value]
            device = self._device() if torch.distributed.get_backend() == "nccl" else None
            torch.distributed.broadcast_object_list(values, src=0, device=device)
        return values[0]

    def mark(self, probe: str) -> None:
        """Say which change is being tried, so that a program that it breaks tells."""
        self._put(f"trying_{self.rank}", probe)

    def show_progress(self, text: str) -> None:
        """Say what is being measured."""
        if self.rank == 0:
            self._put("progress", text)

    def _put(self, name: str, text: str) -> None:
        """Write a file of the diagnosis's folder whole."""
        temporary = self._folder / f".{name}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._folder / name)
