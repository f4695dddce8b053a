"""Windows of loops that fetch batches ahead, in simulated time."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrainkit.diagnosis.observe import windows
from pretrainkit.diagnosis.probes import plan
from pretrainkit.diagnosis.probes.plan import Plan
from pretrainkit.diagnosis.probes.switches import Switch


def batch(width: int, real: int) -> dict[str, torch.Tensor]:
    """One row."""
    return {"input_ids": torch.ones(1, width, dtype=torch.long), "attention_mask": (torch.arange(width) < real)[None]}


class Loop:
    """A training loop in simulated time that has `ahead` batches in hand when it steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int, ahead: int = 0) -> None:
        self.now_s, self.session = (
            0.0,
            SimpleNamespace(
                **{"spec": SimpleNamespace(budget_s=1e9), "loader": None, "source": None, "recorded": None},
                **{"on_gpu": False, "micro_batches": 0, "backward_passes": 0, "agree": lambda value: value},
                **dict.fromkeys(("mark", "show_progress", "synchronize"), lambda *_: None),
            ),
        )
        for module in (windows, plan):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now_s)
        self.plan = Plan(self.session)  # type: ignore[arg-type]
        self.plan._steps = steps
        self.plan._kept = [batch(100, 20)]
        self.ahead = ahead

    def run(self, switch: Switch, own: Iterator[Any]) -> list[dict[str, Any]]:
        """Three pairs of a change; a step takes 0.01 s a token of the batch."""
        self.plan._switches = {"change": switch}
        queue = [next(own) for _ in range(self.ahead)]
        for _ in range(3):
            pair = self.plan._pair("change")
            next(pair, None)
            while True:
                source = self.session.source
                queue.append(next(source if source is not None else own))
                self.session.micro_batches += 1
                self.now_s += 0.01 * queue.pop(0)["input_ids"].numel()
                try:
                    pair.send({})
                except StopIteration:
                    break
        return self.plan._pairs["change"]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_batch_that_was_fetched_before_is_no_part_of_a_window(
    monkeypatch: pytest.MonkeyPatch, steps: int, ahead: int
) -> None:
    """The Trainer of transformers holds the next batch already when it steps."""
    own = iter(lambda: batch(100, 20), None)
    pairs = Loop(monkeypatch, steps, ahead).run(Switch(seen=[batch(20, 20)]), own)
    for pair in pairs:
        assert sum(pair["before_s"]) == pytest.approx(steps)
        assert sum(pair["after_s"]) == pytest.approx(0.2 * steps)


def test_the_begin_of_a_window_on_a_gpu_is_no_part_of_a_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the device waits for the host once a window: 0.5 s here, of steps of 1 s that become 0.2 s."""
    loop = Loop(monkeypatch, steps=2)
    loop.session.on_gpu = True

    def synchronize() -> None:
        loop.now_s += 0.25

    loop.session.synchronize = synchronize
    pairs = loop.run(Switch(seen=[batch(20, 20)]), iter(lambda: batch(100, 20), None))
    assert len(pairs) == 2  # the first showed how short the steps are
    for pair in pairs:
        assert sum(pair["after_s"]) / sum(pair["before_s"]) == pytest.approx(0.2, abs=0.03)


def test_workers_are_measured_over_whole_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers that start together give four batches at a time, and then none for as long as one takes."""
    loop = Loop(monkeypatch, steps=2)

    def bursts(*_: Any) -> Iterator[Any]:
        while True:
            loop.now_s += 0.8
            for _ in range(4):
                yield batch(1, 1)

    def slow() -> Iterator[Any]:
        while True:
            loop.now_s += 0.8
            yield batch(1, 1)

    monkeypatch.setattr(plan, "reread", bursts)
    loop.session.loader = SimpleNamespace(num_workers=0, prefetch_factor=None)
    pairs = loop.run(Switch(num_workers=4, reads_data=True), slow())
    for pair in pairs:
        assert sum(pair["before_s"]) == pytest.approx(2 * 0.81)
        assert sum(pair["after_s"]) == pytest.approx(2 * (0.2 + 0.01))


def test_a_second_step_that_is_slow_does_not_make_a_slow_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the first steps choose kernels and make memory."""
    now_s = [0.0]
    monkeypatch.setattr(windows.time, "perf_counter", lambda: now_s[0])
    quiet = dict.fromkeys(("show_progress", "synchronize", "stop_looking_for_modules"), lambda *_: None)
    steps = windows.warm_up(SimpleNamespace(**quiet, agree=lambda value: value), slow_s=1.0)  # type: ignore[arg-type]
    next(steps)
    found = None
    for step_s in (8.0, 1.5, *[0.1] * 50):
        now_s[0] += step_s
        try:
            steps.send({})
        except StopIteration as stop:
            found = stop.value
            break
    assert found == 2
