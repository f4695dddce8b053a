"""The causes of lost time, ranked: each with its share, what shows it, the change to make and the measured gain.

A cause is what could be otherwise with the same training. What would change numbers, memory or the batch (bf16,
torch.compile, a larger global batch) is an option: measured as well, and listed apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median_high

from pretrainkit.diagnosis import advice
from pretrainkit.diagnosis.advice import Cause, cause, percent
from pretrainkit.diagnosis.evidence import WORTH_TELLING, Evidence, Shown, step_s
from pretrainkit.diagnosis.statistics import Interval

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
WORKERS = ("workers_2", "workers_4", "workers_8")
TOKENIZING_SHARE = 0.5
"""Of the time for data that must be spent in a tokenizer for that to be the cause."""
LITTLE = 0.05
"""A change that saves less than this for certain is not worth making."""
SLOWER_RANK = 0.05
SLOWEST_OFTEN = 0.8
"""Share of the rounds in which the same rank must be the slowest."""


@dataclass
class Findings:
    """All that the probes have shown."""

    causes: list[Cause] = field(default_factory=list)
    """Largest share first."""
    options: list[Cause] = field(default_factory=list)
    fine: list[dict[str, str]] = field(default_factory=list)
    """What was checked and costs nothing: what, found."""
    uncertain: list[dict[str, str]] = field(default_factory=list)
    """What may cost time, but less than could be told here."""

    def add(self, cause: Cause) -> None:
        """Put a cause or option in its place, by its share."""
        listed = self.options if cause.is_option else self.causes
        listed.append(cause)
        listed.sort(key=lambda cause: -cause.share.value)

    def judge(self, shown: Shown, cause: Cause | None) -> None:
        """Add the cause if its probe has shown it for certain, or tell that it is fine or uncertain."""
        found = f"the change would save {percent(shown.share)}"
        if cause and shown.is_certain and shown.share.value >= WORTH_TELLING:
            self.add(cause)
        elif shown.share.high < LITTLE:
            self.tell_fine(shown.probe, found)
        else:
            self.tell_uncertain(shown.probe, f"{found}: {shown.doubt or 'too wide an interval'}")

    def tell_fine(self, probe: str, found: str) -> None:
        """Note what a probe has found that costs nothing."""
        self.fine.append({"what": CHECKED.get(probe, probe), "found": found})

    def tell_uncertain(self, probe: str, found: str) -> None:
        """Note what may cost time."""
        self.uncertain.append({"what": CHECKED.get(probe, probe), "found": found})


def find(ranks: list[Evidence], *, kind: str) -> Findings:
    """What the windows of all ranks show; `kind` is that of the program."""
    findings, first = Findings(), ranks[0]
    _data(findings, first, kind)
    _epoch_starts(findings, first)
    _compute(findings, first)
    _ranks(findings, ranks)
    for name, why in first.rank.get("why_not", {}).items():
        if why != "left out":
            findings.tell_fine(name, why)
    return findings


def _data(findings: Findings, rank: Evidence, kind: str) -> None:
    """Time for data, put down to the tokenizer, the workers, or reading itself."""
    data = rank.shown("data")
    if data is None:
        return
    if not data.is_certain or data.share.value < WORTH_TELLING:
        findings.judge(data, None)
        return
    data = _without_new_shapes(findings, rank, data)
    if data.share.value < WORTH_TELLING:
        return
    loader = rank.rank["facts"]["loader"] or {}
    # Where there are workers, the loop itself only waits for them.
    samples = (loader.get("num_workers") and rank.rank.get("worker_samples")) or rank.rank["observed"]["samples"]
    places, tokenizing = Counter[str](), 0
    for sample in samples:
        if sample["phase"] == "data":
            tokenizing += sample["count"] * sample["is_tokenizer"]
            places[sample["where"]] += sample["count"]
    where = places.most_common(1)[0][0] if places else "its reading"
    tokenizer_share = tokenizing / max(places.total(), 1)
    reading = {"where": where, "num_workers": loader.get("num_workers", 0)}
    best = _best(rank, [*WORKERS, "prefetch", "pinned_memory"])
    if tokenizer_share >= TOKENIZING_SHARE:
        share = data.share.scaled(tokenizer_share)
        findings.add(cause("tokenizing", share, where=where, tokenizer_share=tokenizer_share))
        rest = data.share.value - share.value
    elif loader.get("num_workers") == 0:
        tried = _largest(rank, WORKERS)
        if tried is not None and tried.share.value < 0 and tried.share.high < data.share.value / 4:
            why = f"; more don't help here ({advice.with_workers(tried)})"
            findings.add(cause("data", data.share, **reading, tried=why))
        else:
            findings.add(advice.no_workers(data.share, tried, where, kind))
        rest = 0.0
    elif best is not None:
        findings.judge(best, advice.loader(best, loader, where, kind))
        rest = data.share.value - best.share.value
    else:
        rest = data.share.value
    if rest >= max(WORTH_TELLING, data.noise):
        low = max(0.0, rest - (data.share.value - data.share.low))
        share = Interval(rest, low, min(data.share.high, rest + data.share.high - data.share.value))
        findings.add(cause("data", share, **reading, tried=""))


def _without_new_shapes(findings: Findings, rank: Evidence, data: Shown) -> Shown:
    """What of the saving by known batches is time for data; the rest, where graphs are compiled, is their shapes."""
    observed = rank.rank["observed"]
    shapes = {tuple(batch["shape"]) for batch in observed["batches"]}
    if not observed["compiled_frames"] or len(shapes) == 1:
        return data
    waiting = observed["phases_s"].get("data", 0.0) / observed["wall_s"]
    part = min(1.0, waiting / data.share.value)
    compiling = data.share.scaled(1 - part)
    if compiling.value < max(WORTH_TELLING, data.noise):
        return data
    counts = {"batches": len(observed["batches"]), "compiled": observed["compiled_frames"]}
    findings.add(cause("new_shapes", compiling, shapes=len(shapes), **counts))
    return replace(data, share=data.share.scaled(part))


def _epoch_starts(findings: Findings, rank: Evidence) -> None:
    """Workers that are started again for every epoch."""
    starts, loader = rank.rank.get("epoch_starts"), rank.rank["facts"]["loader"] or {}
    if not loader.get("num_workers") or loader.get("persistent_workers"):
        findings.tell_fine("persistent_workers", "on already" if loader.get("num_workers") else "no workers")
        return
    if not starts or not loader.get("batches"):
        return
    new, kept = (sorted(starts[name]) for name in ("new_s", "kept_s"))
    epoch_s = loader["batches"] / max(rank.micro_batches_per_step, 1.0) * rank.as_is_step_s.value

    def share(lost_s: float) -> float:
        return lost_s / (epoch_s + max(lost_s, 0.0))

    middle = len(new) // 2
    saved = Interval(share(new[middle] - kept[middle]), share(new[0] - kept[-1]), share(new[-1] - kept[0]))
    if saved.value >= WORTH_TELLING and saved.low > 0:
        findings.add(cause("persistent_workers", saved, new_s=new[middle], batches=loader["batches"]))
    else:
        findings.tell_fine("persistent_workers", f"would save {saved.value:.1%} of an epoch")


def _best(rank: Evidence, probes: Iterable[str]) -> Shown | None:
    """Of several probes the certain one that saves most."""
    shown = [found for found in map(rank.shown, probes) if found is not None and found.is_certain]
    return max(shown, key=lambda found: found.share.value, default=None)


def _largest(rank: Evidence, probes: Iterable[str]) -> Shown | None:
    """Of several probes the one that saves most, certain or not."""
    return max(filter(None, map(rank.shown, probes)), key=lambda found: found.share.value, default=None)


def _compute(findings: Findings, rank: Evidence) -> None:
    switches = rank.rank.get("switches", {})
    merged = [name for name in switches if name.startswith("micro_batch_x")]
    for shown in map(rank.shown, (name for name in switches if name not in merged)):
        if shown is not None:
            findings.judge(shown, advice.of_switch(shown, rank.rank))
    best = _best(rank, merged) or _largest(rank, merged)
    if best is not None:
        findings.judge(best, advice.micro_batch(best, rank))


def _ranks(findings: Findings, ranks: list[Evidence]) -> None:
    """The slowest rank, and what exchanging gradients costs."""
    if len(ranks) == 1:
        return
    own = [own_times(rank) for rank in ranks]
    rounds = min(map(len, own))
    if not rounds:
        return
    as_is_s = ranks[0].as_is_step_s.value
    means = [sorted(times)[len(times) // 4] for times in own]
    slowest = means.index(max(means))
    others = [times for rank, times in enumerate(own) if rank != slowest]
    # In each round, behind the middle one of the others.
    rows = zip(own[slowest], *others, strict=False)
    behind = sorted((slow_s - median_high(others_s)) / as_is_s for slow_s, *others_s in rows)
    often = sum(value > 0 for value in behind) / rounds
    share = Interval(behind[rounds // 2], behind[rounds // 8], behind[-1 - rounds // 8])
    if share.value >= SLOWER_RANK and often >= SLOWEST_OFTEN and share.low > 0:
        findings.add(advice.slow_rank(share, ranks, slowest, means))
    else:
        behind_by = f"rank {slowest} is the slowest by {max(0.0, share.value):.1%} of a step"
        findings.tell_fine("speed of the ranks", f"{behind_by}, in {often:.0%} of the rounds")
    exchange = ranks[slowest].shown("no_gradient_exchange")
    if exchange is not None:
        findings.judge(exchange, cause("communication", exchange, ranks=len(ranks)))


def own_times(rank: Evidence) -> list[float]:
    """Seconds of a step that a rank takes by itself, by round: without waiting for the others."""
    free = rank.windows("no_gradient_exchange")
    if free:
        return [step_s(window) for window in free]
    profile = rank.rank.get("profile") or {}
    windows = rank.windows("no_gradient_exchange", is_changed=False) or rank.as_is()
    if rank.rank["facts"]["device"] != "cpu":
        # Ranks that wait are busy in NCCL's kernels: the slowest is the one that is least.
        waiting = profile.get("nccl_s", 0.0) / max(profile.get("wall_s", 1.0), 1e-9)
        return [step_s(window) * (1 - waiting) for window in windows]
    return [(window["wall_s"] - window["phases_s"].get("communication", 0.0)) / window["steps"] for window in windows]
