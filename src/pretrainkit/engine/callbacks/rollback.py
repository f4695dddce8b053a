"""Going back to the last checkpoint after a bad step: each rank replaces its process by a new one.

A new process takes everything from the checkpoint, as after any stop, and no library has to give its state back. It has
the same process id, output and environment, so that whoever has started the ranks need not know. Only their store is
new: torchrun's has the addresses of the old ranks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

from pretrainkit.engine.agreement import all_ranks_any, share_number
from pretrainkit.engine.child_processes import kill_children
from pretrainkit.errors import PretrainkitError
from pretrainkit.run.metrics import RunRecorder


class RollbackError(PretrainkitError):
    """A bad step whose samples are left out from now on; raised on all ranks."""


class RollBack(pl.Callback):
    """Starts the rank again after a RollbackError. The last callback: a save in the background is finished before."""

    def __init__(self, recorder: RunRecorder | None) -> None:
        self._recorder = recorder

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, RollbackError):
            return
        kill_children()
        if self._recorder:
            self._recorder.close()
        port = share_number(_free_port() if torch.distributed.get_rank() == 0 else 0)
        all_ranks_any(False)  # none ends its connections while another still waits for the port
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        start_again()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def start_again() -> None:
    """Replace this process by one with the same command line. It gets stdin, stdout and stderr, and no other file."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2:  # a device that stays open would keep the GPU's memory
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
