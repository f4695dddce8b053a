"""How fast a program is, in the units people compare: steps, samples, tokens without padding, MFU."""

from __future__ import annotations

from collections import Counter
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
    padding = padding_of(rank)
    per_batch = rank.get("kept") or {}
    per_step = evidence.micro_batches_per_step
    world_size = rank["world_size"]
    if run is not None:
        samples = float(run.config.training.global_batch_size)
        tokens = real_tokens = samples * run.config.data.sequence_length
    else:
        seen = rank["observed"]["batches"]
        count = max(len(seen), 1)
        # Of the window that was looked at, which has the batches as they come.
        per_batch = {name: sum(item[name] for item in seen) / count for name in ("samples", "tokens", "real_tokens")}
        samples, tokens, real_tokens = (
            per_batch[name] * per_step * world_size for name in ("samples", "tokens", "real_tokens")
        )
    flops = flops_per_token(rank, run)
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
        "padding": padding,
        "flops_per_token": flops,
        "mfu": rate.scaled(flops / world_size / peak).to_json() if flops and peak and tokens else None,
        "peak_memory_gib": rank.get("peak_memory_gib"),
        "ranks": world_size,
        "device": rank["facts"]["device"],
        "timed_windows": [[window["first_step"], window["steps"]] for window in evidence.as_is()],
    }


def flops_per_token(rank: dict[str, Any], run: ResolvedRun | None) -> float | None:
    """Of forward and backward: the run's own formula, or 6 x parameters plus attention where the config tells."""
    if run is not None:
        return training_flops_per_token(run.model, run.config.data.sequence_length)
    model = rank["facts"]["model"]
    if not model.get("matmul_parameters"):
        return None
    flops = 6.0 * model["matmul_parameters"]
    config, lengths = model["config"], [batch["shape"] for batch in rank["observed"]["batches"] if batch["tokens"]]
    if lengths and config.get("num_hidden_layers") and config.get("hidden_size"):
        width = sum(shape[1] for shape in lengths) / len(lengths)
        heads = config.get("num_attention_heads", 0) * config.get("head_dim", 0) or config["hidden_size"]
        flops += 6.0 * config["num_hidden_layers"] * heads * width
    return flops


def padding_of(rank: dict[str, Any]) -> dict[str, Any] | None:
    """Padding of the batches that were looked at, and what other policies would make of the same rows."""
    seen = [batch for batch in rank["observed"]["batches"] if batch["tokens"]]
    if not seen:
        return None
    lengths = [length for batch in seen for length in batch["lengths"]]
    real, longest = sum(lengths), max(lengths)
    shapes = Counter(tuple(batch["shape"]) for batch in seen)
    ordered, size = sorted(lengths), seen[0]["shape"][0]
    grouped = sum(max(ordered[i : i + size]) * len(ordered[i : i + size]) for i in range(0, len(ordered), size))
    return {
        "share": 1 - real / sum(batch["tokens"] for batch in seen),
        "batches": len(seen),
        "distinct_shapes": len(shapes),
        "compiled_frames": rank["observed"]["compiled_frames"],
        "policies": {
            "as it is": 1 - real / sum(batch["tokens"] for batch in seen),
            "longest of the batch": 1 - real / sum(max(batch["lengths"]) * len(batch["lengths"]) for batch in seen),
            "fixed length": 1 - real / max(longest * len(lengths), 1),
            "grouped by length": 1 - real / max(grouped, 1),
            "packed": 0.0,
        },
        "lengths": lengths[:5000],
    }


def _rate(step_s: Interval, amount: float) -> Interval:
    return Interval(amount / step_s.value, amount / step_s.high, amount / step_s.low)
