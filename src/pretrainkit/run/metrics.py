"""The records of a run: one JSON object a line in metrics.jsonl, and one line on the terminal."""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import psutil

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import get_logger
from pretrainkit.models.flops import training_flops_per_token
from pretrainkit.run.attempts import AttemptLog
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.held_out import describe_losses
from pretrainkit.run.json_lines import JsonLinesWriter
from pretrainkit.units import format_count, format_duration

TRACKER_FLUSH_TIMEOUT_S = 60.0
"""The run is done, and its GPUs wait: what isn't sent by then is on disk."""
_ETA_RECORDS = 20
"""The ETA uses the median of the last records: the first step of a start is an outlier, and some later ones are."""

_LINE_SHARE, _LINE_S = 0.05, 30.0
"""Share of the steps, and time, after which --log_interval auto logs another."""

log = get_logger(__name__)


class RunRecorder:
    """Writes the records of one attempt; only the first rank has one.

    A kill loses at most the line being written. After a resume a step may be in the file twice: the later line counts.
    """

    def __init__(self, run: ResolvedRun, *, peak_flops: float | None = None) -> None:
        """`peak_flops`: of the device in dense bf16, where that is known."""
        folder = RunFolder.of(run)
        self._run, self._peak_flops = run, peak_flops
        self._attempts, self._file = AttemptLog(folder), JsonLinesWriter(folder.metrics)
        self.trackers: list[Any] = []
        """Each a `Tracker` or a logger of Lightning's."""
        self._data_wait_s = 0.0
        self._padded: list[Any] = []
        self._last_time_s = time.monotonic()
        self._last_step: int | None = None
        self._last_samples = 0
        self._step_times_s = deque[float](maxlen=_ETA_RECORDS)
        self._first_step = 1
        self._line_at_s, self._line_steps, self._line_time_s = self._last_time_s, 0, 0.0
        """The last step that was logged, and the steps since then with their time."""

    def start(self, step: int, consumed_samples: int = 0) -> None:
        """Start timing; `step` optimizer steps are done, with so many samples."""
        self._last_samples = consumed_samples
        self._last_time_s, self._last_step = time.monotonic(), step
        self._line_at_s, self._first_step = self._last_time_s, step + 1

    def data_wait(self, seconds: float) -> None:
        """Add time that the first rank has waited for its data."""
        self._data_wait_s += seconds

    def padding(self, loss_mask: Any) -> None:
        """Count the positions of a microbatch whose loss doesn't count; `loss_mask` [batch, sequence] is 0 there."""
        self._padded.append((loss_mask == 0).float().mean())  # on the device: nothing waits for it here

    def train_step(
        self,
        step: int,
        *,
        consumed_samples: int,
        loss: float,
        learning_rate: float,
        grad_norm: float | None,
        peak_memory_gib: float | None = None,
        by_label: tuple[dict[str, float], dict[str, int]] | None = None,
        router: dict[str, float] | None = None,
    ) -> None:
        """Record optimizer step number `step` (the first is 1); rates are means since the last record.

        `by_label`: the loss and the tokens of each label of documents since the last record; `router`: how the routers
        shared out the tokens since then.
        MFU (model FLOPs use) is a rank's model FLOP/s over its device's dense bf16 peak, where that is known.
        """
        run, now_s = self._run, time.monotonic()
        steps = step - (self._last_step if self._last_step is not None else step - 1)
        step_time_s = (now_s - self._last_time_s) / max(steps, 1)
        self._last_time_s, self._last_step = now_s, step
        self._step_times_s.append(step_time_s)
        samples = (consumed_samples - self._last_samples) / max(steps, 1)
        self._last_samples = consumed_samples
        tokens_per_second = samples * run.config.data.sequence_length / step_time_s
        flops_per_token = training_flops_per_token(run.model, run.config.data.sequence_length)
        flops_per_rank = tokens_per_second * flops_per_token / run.world_size
        data_wait_share = self._data_wait_s / max(steps * step_time_s, 1e-9)
        padding_share = sum(map(float, self._padded)) / len(self._padded) if self._padded else None
        mfu = flops_per_rank / self._peak_flops if self._peak_flops else None
        self._data_wait_s, self._padded = 0.0, []
        self._write(
            step=step,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            tokens=consumed_samples * run.config.data.sequence_length,
            step_time_s=round(step_time_s, 4),
            tokens_per_second=round(tokens_per_second, 2),
            tokens_per_second_per_rank=round(tokens_per_second / run.world_size, 2),
            tflops_per_rank=round(flops_per_rank / 1e12, 4),
            mfu=mfu and round(mfu, 4),
            data_wait_share=round(data_wait_share, 4),
            padding_share=padding_share and round(padding_share, 6),
            peak_memory_gib=peak_memory_gib and round(peak_memory_gib, 3),
            **({} if by_label is None else {"loss_by_label": by_label[0], "tokens_by_label": by_label[1]}),
            **({} if router is None else {"router": {name: round(value, 6) for name, value in router.items()}}),
        )
        self._line_steps += steps
        self._line_time_s += steps * step_time_s
        if not self._is_logged(step, now_s):
            return
        tokens_per_second *= step_time_s * self._line_steps / self._line_time_s
        mfu = mfu and mfu * step_time_s * self._line_steps / self._line_time_s
        self._line_at_s, self._line_steps, self._line_time_s = now_s, 0, 0.0
        norm = "" if grad_norm is None else f"grad norm {grad_norm:.3f}  "
        log.info(
            f"step {step}/{run.max_steps}  loss {loss:.4f}  lr {learning_rate:.3g}  {norm}"
            f"{format_count(tokens_per_second)} tokens/s  {'' if mfu is None else f'MFU {mfu:.1%}  '}"
            f"{format_duration((run.max_steps - step) * statistics.median(self._step_times_s))} left"
        )

    def _is_logged(self, step: int, now_s: float) -> bool:
        """Whether a step gets a line in the log: each that is recorded, unless --log_interval is auto."""
        max_steps = self._run.max_steps
        is_due = step in (self._first_step, max_steps) or step % math.ceil(max_steps * _LINE_SHARE) == 0
        return bool(self._run.config.training.log_interval) or is_due or now_s - self._line_at_s >= _LINE_S

    def validation(self, step: int, fields: dict[str, Any]) -> None:
        """Record the held-out losses after optimizer step `step` (`pretrainkit.run.held_out`); their time doesn't
        count as training time.
        """
        self._write(step=step, **fields)
        log.info(f"step {step}/{self._run.max_steps}  held-out loss {describe_losses(fields)}")

    def event(self, kind: str, **details: Any) -> None:
        """Record something that happened, such as the start of an attempt or a checkpoint."""
        self._write(event=kind, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), **details)

    def skip_time(self, seconds: float) -> None:
        """Exclude time that has just passed from training time: an evaluation or a save."""
        self._last_time_s += seconds

    def _write(self, **record: Any) -> None:
        finite = {name: _finite(value) for name, value in record.items()}
        self._attempts.add(finite)
        self._file.append(finite)
        if "event" not in record:
            numbers = dict[str, float]()
            for name, value in record.items():
                parts = {f"{name}/{label}": part for label, part in value.items()} if isinstance(value, dict) else {}
                numbers |= parts or ({} if name == "step" or value is None else {name: value})
            self._send_to_trackers(lambda tracker: tracker.log_metrics(numbers, record["step"]))

    def _send_to_trackers(self, send: Callable[[Any], None]) -> None:
        for tracker in list(self.trackers):
            try:
                send(tracker)
            except Exception as error:  # a disk, a server, or an error of the library's own
                self.trackers.remove(tracker)
                log.error("%s failed and gets no more records of this attempt: %r", tracker.name, error)

    def close(self) -> None:
        """Let the trackers send what is queued, with a timeout: the run is done, and other ranks wait."""
        trackers = len(self.trackers)
        self._send_to_trackers(_finish)
        if len(self.trackers) < trackers:  # Python would wait for the library's process when it exits
            for process in psutil.Process().children(recursive=True):
                process.kill()


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finish(tracker: Any) -> None:
    """End a tracker in the main thread, as W&B asks; raises TimeoutError when it takes too long."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done within {format_duration(TRACKER_FLUSH_TIMEOUT_S)}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TRACKER_FLUSH_TIMEOUT_S)
    try:
        tracker.finalize("success")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
