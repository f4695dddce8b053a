"""How fast a program is, in the units people compare: steps, samples, tokens without padding, MFU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.diagnosis.evidence import Evidence
from pretrainkit.diagnosis.statistics import Interval
from pretrainkit.models.flops import training_flops_per_token
from pretrainkit.run.gpu_specs import peak_flops


def speed_of(evidence: Evidence, run: ResolvedRun | None) -> dict[str, Any]:
    """The speed of all ranks together, with intervals from windows of the program as it is."""
    rank, step_s = evidence.rank, evidence.as_is_step_s
    per_step, world_size, device = evidence.micro_batches_per_step, rank["world_size"], rank["facts"]["device"]
    if run is not None:
        samples = float(run.config.training.global_batch_size)
        tokens = samples * run.config.data.sequence_length
    else:
        seen = rank["seen"]
        samples, tokens = (
            sum(item[name] for item in seen) * per_step * world_size / max(len(seen), 1)
            for name in ("samples", "real_tokens")
        )
    rate, mfu = _rate(step_s, tokens) if tokens else None, None
    if run and rate and (peak := peak_flops(device)):
        flops = training_flops_per_token(run.model, run.config.data.sequence_length)
        mfu = rate.value * flops / world_size / peak
    return {
        "step_time_s": asdict(step_s),
        "samples_per_second": asdict(_rate(step_s, samples)),
        "effective_tokens_per_second": asdict(rate) if rate else None,
        "tokens_per_step": tokens,
        "samples_per_step": samples,
        "micro_batches_per_step": per_step,
        "padding": padding_of(rank),
        "mfu": mfu,
        "peak_memory_gib": rank.get("peak_memory_gib"),
        "ranks": world_size,
        "device": device,
    }


def padding_of(rank: dict[str, Any]) -> dict[str, Any] | None:
    """Padding of the batches that were seen, and what other policies would make of the same rows."""
    seen = [batch for batch in rank["seen"] if batch["tokens"]]
    if not seen:
        return None
    lengths = [length for batch in seen for length in batch["lengths"]]
    ordered, size = sorted(lengths), seen[0]["samples"]
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    tokens = {
        "as it is": sum(batch["tokens"] for batch in seen),
        "longest of the batch": sum(max(batch["lengths"]) * len(batch["lengths"]) for batch in seen),
        "fixed length": max(lengths) * len(lengths),
        "grouped by length": sum(group[-1] * len(group) for group in groups),
        "packed": sum(lengths),
    }
    policies = {name: 1 - sum(lengths) / max(amount, 1) for name, amount in tokens.items()}
    return {
        "share": policies["as it is"],
        "batches": len(seen),
        "distinct_shapes": len({tuple(batch["shape"]) for batch in seen}),
        "policies": policies,
    }


def _rate(step_s: Interval, amount: float) -> Interval:
    return Interval(amount / step_s.value, amount / step_s.high, amount / step_s.low)
