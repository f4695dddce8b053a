"""What a start does before there are ranks or a job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING, StoppedError
from pretrainkit.files import atomic_folder
from pretrainkit.launch.start_job import _stopped_by_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_ends_a_conversion_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with (
        pytest.raises(StoppedError, match=f"stopped by {number.name} before training began") as stopped,
        _stopped_by_signals(),
        atomic_folder(tmp_path / "model") as folder,
    ):
        (folder / "weights").write_text("half")
        os.kill(os.getpid(), number)
    assert stopped.value.exit_code == EXIT_STOPPED_AFTER_SAVING
    assert signal.getsignal(number) is before and not list(tmp_path.iterdir())
