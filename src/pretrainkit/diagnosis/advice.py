"""What to do about each cause, in words: the title, what was seen, the flag or line to change."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pretrainkit.diagnosis.cause import Cause
from pretrainkit.diagnosis.statistics import Interval

if TYPE_CHECKING:
    from pretrainkit.diagnosis.evidence import Evidence, Shown

CHECKED = {
    "data": "waiting for data",
    "loader": "loader: workers, prefetching",
    **{f"workers_{count}": f"{count} workers of the loader" for count in (2, 4, 8)},
    "prefetch": "prefetching",
    "pinned_memory": "pinned memory",
    "packing": "padding",
    "micro_batch_x2": "micro batch",
    "micro_batch_x4": "micro batch x4",
    "attention": "attention kernel",
    "tf32": "TF32",
    "bf16": "bf16",
    "fused_optimizer": "fused optimizer",
    "threads": "CPU threads",
    "cpu_binding": "CPU binding",
    "logging": "logging and reading values in the loop",
    "checkpoint_writes": "saving",
    "micro_batch": "micro batch",
    "anomaly_detection": "anomaly detection",
    "deterministic": "deterministic algorithms",
    "recomputation": "activation recomputation",
    "compile": "torch.compile",
    "persistent_workers": "workers that stay for the next epoch",
    "no_gradient_exchange": "exchange of gradients",
    "debug_variables": "debug variables",
}
"""Probe -> what it checks, in the report."""


def tokenizing(share: Interval, gain: str, where: str, tokenizer_share: float) -> Cause:
    """Text is made into tokens while the model waits."""
    return Cause(
        "tokenizing",
        "text is tokenized inside the loop",
        share,
        f"{tokenizer_share:.0%} of the time for data is spent in a tokenizer, at {where}",
        "tokenize once, before training: tools/preprocess_data.py (.bin/.idx) or tools/pack_dataset.py (Arrow)",
        f"with the same batches ready-made: {gain}",
    )


def no_workers(share: Interval, tried: Shown | None, gain: str, where: str, kind: str) -> Cause:
    """The process that trains also reads and decodes, one after the other."""
    count = tried.probe.rpartition("_")[2] if tried else "2"
    change = (
        f"--num_workers {count}"
        if kind == "experiment"
        else f"DataLoader(..., num_workers={count}, persistent_workers=True)"
    )
    measured = f"with the same batches ready-made: {gain}"
    if tried:
        measured += f"; {_with_workers(tried)}"
    return Cause(
        "workers",
        "data is fetched by the process that trains (0 workers)",
        share,
        f"the model waits while a batch is made, most of all at {where}",
        change,
        measured,
        evidence=tried.to_json() if tried else {},
    )


def loader(shown: Shown, gain: str, now: dict[str, Any], where: str, kind: str) -> Cause:
    """The loader could deliver faster with other settings."""
    flag = {
        "prefetch": f"prefetch_factor={4 * (now.get('prefetch_factor') or 2)}",
        "pinned_memory": "pin_memory=True",
    }.get(shown.probe, f"num_workers={shown.probe.rpartition('_')[2]}")
    name = {"prefetch": "prefetch", "pinned_memory": "pinned_memory"}.get(shown.probe, "workers")
    change = f"DataLoader(..., {flag})"
    if kind == "experiment" and name == "workers":
        change = f"--num_workers {flag.partition('=')[2]}"
    return Cause(
        name,
        f"data is fetched by {now.get('num_workers', 0)} workers",
        shown.share,
        f"the loop waits for batches, most of all at {where}",
        change + (", persistent_workers=True" if name == "workers" and not now.get("persistent_workers") else ""),
        f"with {flag}: {gain}",
        evidence=shown.to_json(),
    )


def persistent_workers(share: Interval, gain: str, new_s: float, batches: int) -> Cause:
    """Workers are started anew for each epoch."""
    return Cause(
        "persistent_workers",
        "the loader's workers are started again for every epoch",
        share,
        f"{new_s:.2g} s until the first batch of an epoch of {batches} batches",
        "DataLoader(..., persistent_workers=True) (Trainer: dataloader_persistent_workers=True)",
        f"time of an epoch with workers that stay: {gain}",
    )


def new_shapes(share: Interval, gain: str, shapes: int, batches: int, compiled: int) -> Cause:
    """Shapes that were not seen before are compiled, or tuned, while the loop waits."""
    return Cause(
        "new_shapes",
        "every new shape of a batch is compiled again",
        share,
        f"{shapes} shapes in {batches} batches; {compiled} graphs were compiled in these steps",
        "batches of one shape (packed, or pad_to_multiple_of), or torch.compile(dynamic=True)",
        f"with shapes that were seen before: {gain}",
    )


def _with_workers(tried: Shown) -> str:
    """What other numbers of workers did to the step time in the running loop."""
    return f"with {tried.probe.rpartition('_')[2]} workers: step time {-tried.share.value:+.1%}"


def reading(share: Interval, gain: str, where: str, now: dict[str, Any], tried: Shown | None) -> Cause:
    """Data comes too slowly, whatever the loader's settings."""
    return Cause(
        "data",
        "data comes slower than the model takes it",
        share,
        f"{now.get('num_workers', 0)} workers; most of the waiting is at {where}"
        + (f"; more don't help here ({_with_workers(tried)})" if tried else ""),
        "make the samples cheaper to read: decode and clean once, before training; store token ids "
        "(tools/preprocess_data.py), on a local or striped file system",
        f"with the same batches ready-made: {gain}",
    )


def micro_batch(shown: Shown, gain: str, rank: Evidence) -> Cause:
    """Samples that are computed together are faster, each, than alone."""
    factor = int(shown.probe[-1])
    per_step = rank.micro_batches_per_step
    is_option = per_step < 2
    size = rank.rank["kept"]["samples"]
    change = f"micro batch {size:g} -> {size * factor:g}"
    change += (
        ": a larger global batch, which changes the training; or the same with shorter runs of the loop"
        if is_option
        else f", gradient accumulation {per_step:g} -> {max(1, per_step / factor):g}: the same global batch"
    )
    return Cause(
        "larger_batch" if is_option else "micro_batch",
        "micro batches are too small for the processor",
        shown.share,
        f"{size:g} samples of a micro batch take almost as long as {size * factor:g}",
        change,
        f"time per sample, {factor} micro batches joined: {gain}",
        is_option,
        evidence=shown.to_json(),
    )


def slow_rank(share: Interval, gain: str, ranks: list[Evidence], slowest: int, own_s: list[float]) -> Cause:
    """One rank is slower than the others, which wait for it."""
    spent = [_phases(rank) for rank in ranks]
    others = [item for number, item in enumerate(spent) if number != slowest]
    phase = max(
        (name for name in spent[slowest] if name not in ("communication", "backward_passes")),
        key=lambda name: spent[slowest][name] - sum(item.get(name, 0.0) for item in others) / len(others),
        default="compute",
    )
    rank = ranks[slowest].rank
    places = Counter[str]()
    for sample in rank["observed"]["samples"]:
        if sample["phase"] == phase:
            places[sample["where"]] += sample["count"]
    where = f", most of it at {places.most_common(1)[0][0]}" if places else ""
    return Cause(
        "slow_rank",
        f"rank {slowest} on {rank['host']} is slower than the others",
        share,
        f"by itself it takes {own_s[slowest]:.3g} s a step, the others "
        f"{min(value for number, value in enumerate(own_s) if number != slowest):.3g} s and more; "
        f"it loses the time in {phase}{where}",
        f"look at rank {slowest}: its data, its GPU's clocks and neighbours, its cores",
        f"were it as fast as the others: {gain}",
        evidence={"rank": slowest, "own_step_s": own_s, "phase": phase},
    )


def _phases(rank: Evidence) -> dict[str, float]:
    """Seconds of each phase of a step, where the rank runs free if there are such windows."""
    windows = rank.windows("no_gradient_exchange") or rank.as_is()
    spent: Counter[str] = Counter()
    for window in windows:
        spent.update({name: seconds / window["steps"] / len(windows) for name, seconds in window["phases_s"].items()})
    return dict(spent)


def communication(shown: Shown, gain: str, num_ranks: int) -> Cause:
    """Exchanging gradients takes time even for the slowest rank."""
    return Cause(
        "communication",
        "ranks spend time on exchanging gradients",
        shown.share,
        f"{num_ranks} ranks, DistributedDataParallel",
        "exchange less often (gradient accumulation under no_sync()), larger buckets, bf16 gradients; "
        "check the network (NCCL_DEBUG=INFO)",
        f"without the exchange: {gain}",
        is_option=True,
        evidence=shown.to_json(),
    )


def debug_variables(share: Interval, gain: str, names: dict[str, str]) -> Cause:
    """Environment variables for finding faults are on."""
    listed = " ".join(f"{name}={value}" for name, value in names.items())
    return Cause(
        "debug_variables",
        "debug settings are left on",
        share,
        f"in the environment: {listed}",
        f"unset {' '.join(names)}",
        f"without them: {gain}",
    )


def save_interval(share: Interval, seconds: float, interval: int, wanted: int) -> Cause:
    """A run of this project saves too often."""
    return Cause(
        "save_interval",
        "checkpoints are saved too often",
        share,
        f"saving takes {seconds:.3g} s, every {interval} steps",
        f"--save_interval {wanted}",
        f"every {wanted} steps it takes 1% of the time",
    )


def run_micro_batch(shown: Shown, gain: str, size: int, larger: int) -> Cause:
    """A run of this project whose micro batches are too small."""
    return Cause(
        "micro_batch",
        "micro batches are too small for the processor",
        shown.share,
        f"the run was started with --micro_batch_size {larger} in turn with {size}",
        f"--micro_batch_size {larger} (the global batch stays as it is)",
        f"with it: {gain}",
        evidence=shown.to_json(),
    )
