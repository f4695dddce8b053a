"""How fast a program is, in the units people compare: steps, samples, tokens without padding, MFU."""

from __future__ import annotations

from typing import Any

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.diagnosis.evidence import Evidence
from pretrainkit.diagnosis.statistics import Interval
from pretrainkit.models.flops import training_flops_per_token
from pretrainkit.run.gpu_specs import peak_flops


def speed_of(evidence: Evidence, run: ResolvedRun | None) -> dict[str, Any]:
    """The speed of all ranks together, with intervals from windows of the program as it is."""
    rank = evidence.rank
    step_s = evidence.as_is_step_s
    per_step = evidence.micro_batches_per_step
    world_size = rank["world_size"]
    if run is not None:
        samples = float(run.config.training.global_batch_size)
        tokens = real_tokens = samples * run.config.data.sequence_length
    else:
        # Of the window that was looked at, which has the batches as they come.
        seen = rank["observed"]["batches"]
        batches = per_step * world_size / max(len(seen), 1)
        samples, tokens, real_tokens = (
            sum(item[name] for item in seen) * batches for name in ("samples", "tokens", "real_tokens")
        )
    flops = training_flops_per_token(run.model, run.config.data.sequence_length) if run else None
    peak = peak_flops(rank["facts"]["device"])
    rate = _rate(step_s, real_tokens)
    return {
        "step_time_s": step_s.to_json(),
        "samples_per_second": _rate(step_s, samples).to_json(),
        "tokens_per_second": _rate(step_s, tokens).to_json() if tokens else None,
        "effective_tokens_per_second": rate.to_json() if tokens else None,
        "tokens_per_step": tokens,
        "samples_per_step": samples,
        "micro_batches_per_step": per_step,
        "padding": padding_of(rank),
        "flops_per_token": flops,
        "mfu": rate.scaled(flops / world_size / peak).to_json() if flops and peak and tokens else None,
        "peak_memory_gib": rank.get("peak_memory_gib"),
        "ranks": world_size,
        "device": rank["facts"]["device"],
        "timed_windows": [[window["first_step"], window["steps"]] for window in evidence.as_is()],
    }


def padding_of(rank: dict[str, Any]) -> dict[str, Any] | None:
    """Padding of the batches that were looked at, and what other policies would make of the same rows."""
    seen = [batch for batch in rank["observed"]["batches"] if batch["tokens"]]
    if not seen:
        return None
    lengths = [length for batch in seen for length in batch["lengths"]]
    ordered, size = sorted(lengths), seen[0]["shape"][0]
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]

    def share(tokens: int) -> float:
        return 1 - sum(lengths) / max(tokens, 1)

    as_it_is = share(sum(batch["tokens"] for batch in seen))
    return {
        "share": as_it_is,
        "batches": len(seen),
        "distinct_shapes": len({tuple(batch["shape"]) for batch in seen}),
        "compiled_frames": rank["observed"]["compiled_frames"],
        "policies": {
            "as it is": as_it_is,
            "longest of the batch": share(sum(max(batch["lengths"]) * len(batch["lengths"]) for batch in seen)),
            "fixed length": share(max(lengths) * len(lengths)),
            "grouped by length": share(sum(group[-1] * len(group) for group in groups)),
            "packed": 0.0,
        },
        "lengths": lengths[:5000],
    }


def _rate(step_s: Interval, amount: float) -> Interval:
    return Interval(amount / step_s.value, amount / step_s.high, amount / step_s.low)
