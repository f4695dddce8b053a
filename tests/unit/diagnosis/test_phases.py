"""Every moment is charged to exactly one phase."""

from __future__ import annotations

import threading
import time

import pytest

from pretrainkit.diagnosis.observe.phases import BACKWARD, COMMUNICATION, OTHER, PhaseClock


def test_inner_phases_are_taken_out_of_outer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = PhaseClock()
    now[0] = 1.0
    with clock.phase(BACKWARD):
        now[0] = 3.0
        with clock.phase(COMMUNICATION):
            now[0] = 7.0
        now[0] = 8.0
    now[0] = 10.0
    assert clock.end_step() == {OTHER: 3.0, BACKWARD: 3.0, COMMUNICATION: 4.0}
    assert clock.end_step() == {OTHER: 0.0}


def test_other_threads_are_not_charged() -> None:
    clock, entered = PhaseClock(), []
    thread = threading.Thread(target=lambda: entered.append(clock.enter(BACKWARD)))
    thread.start()
    thread.join()
    assert entered == [False]
    assert clock.current == OTHER


def test_the_device_is_waited_for_at_each_border_when_asked() -> None:
    clock, calls = PhaseClock(), []
    clock.synchronize = lambda: calls.append(clock.current)
    with clock.phase(BACKWARD):
        pass
    assert calls == [OTHER, BACKWARD]
