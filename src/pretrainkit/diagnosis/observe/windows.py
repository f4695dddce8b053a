"""Windows of steps, timed: the one way in which this package measures speed."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrainkit.diagnosis.observe.session import Session

Steps = Generator[None, dict[str, float], Any]
"""Lets the program run: each bare `yield` lasts one step and gives the seconds of its phases."""
WINDOW_S, MOST_STEPS = 0.15, 16
"""A window holds as many steps as fit into this, at least 2 and at most so many."""
WARM_UP_S = 0.5
FEWEST_WARM_UP_STEPS, MOST_WARM_UP_STEPS = 4, 40


@dataclass(frozen=True)
class Window:
    """Some steps in a row, timed from end to end with the device waited for."""

    probe: str
    is_changed: bool
    """Measured with the probe's change, or as before it."""
    reads_data: bool
    """The loop's own data, in place of batches that were kept."""
    steps: int
    micro_batches: int
    backward_passes: int
    wall_s: float
    steps_s: list[float]
    """Each step by itself; on a GPU only their sum is known, since steps are not waited for."""
    cpu_s: float
    """CPU time of the process, all its threads."""
    phases_s: dict[str, float]
    step_phases_s: list[dict[str, float]]
    """The same of each step."""


Measuring = Generator[None, dict[str, float], Window]
"""Steps that give a window."""


def measure(session: Session, probe: str, is_changed: bool, steps: int, settle_steps: int) -> Measuring:
    """Let `settle_steps` pass, then time `steps`."""
    for _ in range(settle_steps):
        yield
    session.synchronize()
    session.micro_batches = session.backward_passes = 0
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    of_steps: list[dict[str, float]] = []
    steps_s, since_s = [], begin_s
    for _ in range(steps):
        of_steps.append((yield))
        now_s = time.perf_counter()
        steps_s.append(now_s - since_s)
        since_s = now_s
    session.synchronize()
    wall_s = time.perf_counter() - begin_s
    return Window(
        probe=probe,
        is_changed=is_changed,
        reads_data=session.source is None,
        steps=steps,
        micro_batches=session.micro_batches,
        backward_passes=session.backward_passes,
        wall_s=wall_s,
        steps_s=[wall_s] if session.on_gpu else steps_s,
        cpu_s=time.process_time() - begin_cpu_s,
        phases_s={name: sum(step.get(name, 0.0) for step in of_steps) for name in set().union(*of_steps)},
        step_phases_s=of_steps,
    )


def warm_up(session: Session, slow_s: float) -> Generator[None, dict[str, float], int]:
    """Let the program get going; gives the number of steps of a window: one, where a step takes `slow_s` or longer."""
    times: list[float] = []
    begin_s, goes_on = time.perf_counter(), True
    while goes_on:
        session.show_progress(f"step {len(times) + 1}")
        session.synchronize()
        step_begin_s = time.perf_counter()
        yield
        session.synchronize()
        times.append(time.perf_counter() - step_begin_s)
        if len(times) == 2:
            session.stop_looking_for_modules()
        is_short = len(times) < FEWEST_WARM_UP_STEPS or time.perf_counter() - begin_s < WARM_UP_S
        # A second step may still be slow because kernels are chosen and memory is made.
        is_slow = len(times) > 1 and times[-1] > max(slow_s, times[-2] / 2)
        goes_on = session.agree(len(times) < 2 or (is_short and not is_slow and len(times) < MOST_WARM_UP_STEPS))
    step_s = sorted(times[len(times) // 2 :])[len(times) // 8]
    return int(session.agree(1 if step_s > slow_s else max(2, min(MOST_STEPS, round(WINDOW_S / step_s)))))
