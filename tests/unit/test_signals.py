"""A signal ends work as an error does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING, StoppedError
from pretrainkit.files import atomic_folder
from pretrainkit.signals import STOP_SIGNALS, stopped_by_signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_a_conversion_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with (
        pytest.raises(StoppedError, match=f"stopped by {number.name}(.|\n)*again") as stopped,
        stopped_by_signals("again", STOP_SIGNALS),
        atomic_folder(tmp_path / "model") as folder,
    ):
        (folder / "weights").write_text("half")
        os.kill(os.getpid(), number)
    assert stopped.value.exit_code == EXIT_STOPPED_AFTER_SAVING
    assert signal.getsignal(number) is before and not list(tmp_path.iterdir())


def test_nohup_is_heeded(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals("again", STOP_SIGNALS):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_passes_what_expects_failures_and_a_second_does_not_cut_short_the_tidying_up() -> None:
    tidied = False
    with pytest.raises(StoppedError, match="stopped by SIGTERM") as stopped, stopped_by_signals("again"):
        try:
            try:
                signal.raise_signal(signal.SIGTERM)
            except Exception as error:
                pytest.fail(f"taken for a failure: {error}")
        finally:
            signal.raise_signal(signal.SIGTERM)
            tidied = True
    assert tidied
    assert (stopped.value.exit_code, stopped.value.action) == (85, "again")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_forked_process_leaves_stops_to_its_parent() -> None:
    with stopped_by_signals("again"):
        child = os.fork()
        if not child:
            try:
                signal.raise_signal(signal.SIGTERM)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
