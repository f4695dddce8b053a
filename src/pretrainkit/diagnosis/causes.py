"""The causes of lost time, ranked: each with its share, what shows it, the change to make and the measured gain.

A cause is what could be otherwise with the same training. What would change numbers, memory or the batch (bf16,
torch.compile, a larger global batch) is an option: measured as well, and listed apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pretrainkit.diagnosis import advice, switch_advice
from pretrainkit.diagnosis.cause import Cause
from pretrainkit.diagnosis.evidence import WORTH_TELLING, Evidence, Shown
from pretrainkit.diagnosis.statistics import Interval

OPTIONS = ("bf16", "compile", "recomputation", "larger_batch")
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
        """Put a cause or option in its place."""
        (self.options if cause.is_option else self.causes).append(cause)

    def rank(self) -> None:
        """Sort by share."""
        for listed in (self.causes, self.options):
            listed.sort(key=lambda cause: -cause.share.value)


def find(ranks: list[Evidence], *, kind: str) -> Findings:
    """What the windows of all ranks show; `kind` is that of the program."""
    findings, first = Findings(), ranks[0]
    _data(findings, first, kind)
    _epoch_starts(findings, first)
    _compute(findings, first, kind)
    _ranks(findings, ranks)
    for name, why in first.rank.get("why_not", {}).items():
        if why not in ("left out",):
            findings.fine.append({"what": advice.CHECKED.get(name, name), "found": why})
    findings.rank()
    return findings


def judged(findings: Findings, shown: Shown, make: Any) -> None:
    """Add what `make` gives for a probe if it shows a certain cause, or tell that it is fine or uncertain."""
    what = advice.CHECKED.get(shown.probe, shown.probe)
    found = f"{percent(shown.share.value)} [{percent(shown.share.low)} to {percent(shown.share.high)}]"
    if shown.is_certain and shown.share.value >= WORTH_TELLING:
        findings.add(make())
    elif shown.share.high < LITTLE:
        findings.fine.append({"what": what, "found": f"the change would save {found}"})
    else:
        doubt = shown.doubt or "too wide an interval"
        findings.uncertain.append({"what": what, "found": f"the change would save {found}: {doubt}"})


def percent(share: float) -> str:
    """A share for people."""
    return f"{share:.1%}"


def gain(share: Interval) -> str:
    """A share that is saved, as the speed that results."""
    return (
        f"step time -{percent(share.value)} [{percent(share.low)} to {percent(share.high)}], "
        f"{1 / max(1 - share.value, 1e-3):.2f}x the speed"
    )


def _data(findings: Findings, rank: Evidence, kind: str) -> None:
    """Time for data, put down to the tokenizer, the workers, or reading itself."""
    data = rank.shown("data")
    if data is None:
        return
    if not data.is_certain or data.share.value < WORTH_TELLING:
        judged(findings, data, lambda: None)
        return
    data = _without_new_shapes(findings, rank, data)
    if data.share.value < WORTH_TELLING:
        return
    places = Counter[str]()
    tokenizing = looks = 0
    # Where there are workers, the loop itself only waits for them.
    has_workers = bool((rank.rank["facts"]["loader"] or {}).get("num_workers"))
    samples = (has_workers and rank.rank.get("worker_samples")) or rank.rank["observed"]["samples"]
    for sample in samples:
        if sample["phase"] == "data":
            looks += sample["count"]
            tokenizing += sample["count"] * sample["is_tokenizer"]
            places[sample["where"]] += sample["count"]
    where = places.most_common(1)[0][0] if places else "its reading"
    loader = rank.rank["facts"]["loader"] or {}
    tokenizer_share = tokenizing / max(looks, 1)
    best = _best(rank, [*WORKERS, "prefetch", "pinned_memory"])
    if tokenizer_share >= TOKENIZING_SHARE:
        share = data.share.scaled(tokenizer_share)
        findings.add(advice.tokenizing(share, gain(share), where, tokenizer_share))
        rest = data.share.value - share.value
    elif loader.get("num_workers") == 0:
        tried = _largest(rank, WORKERS)
        if tried is not None and tried.share.value < 0 and tried.share.high < data.share.value / 4:
            findings.add(advice.reading(data.share, gain(data.share), where, loader, tried))
        else:
            findings.add(advice.no_workers(data.share, tried, gain(data.share), where, kind))
        rest = 0.0
    elif best is not None:
        judged(findings, best, lambda: advice.loader(best, gain(best.share), loader, where, kind))
        rest = data.share.value - best.share.value
    else:
        rest = data.share.value
    if rest >= max(WORTH_TELLING, data.noise):
        low = max(0.0, rest - (data.share.value - data.share.low))
        share = Interval(rest, low, min(data.share.high, rest + data.share.high - data.share.value))
        findings.add(advice.reading(share, gain(share), where, loader, None))


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
    findings.add(
        advice.new_shapes(
            compiling, gain(compiling), len(shapes), len(observed["batches"]), observed["compiled_frames"]
        )
    )
    return replace(data, share=data.share.scaled(part))


def _epoch_starts(findings: Findings, rank: Evidence) -> None:
    """Workers that are started again for every epoch."""
    starts, loader = rank.rank.get("epoch_starts"), rank.rank["facts"]["loader"] or {}
    what = advice.CHECKED["persistent_workers"]
    if not loader.get("num_workers") or loader.get("persistent_workers"):
        found = "on already" if loader.get("num_workers") else "no workers"
        findings.fine.append({"what": what, "found": found})
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
        findings.add(advice.persistent_workers(saved, gain(saved), new[middle], loader["batches"]))
    else:
        findings.fine.append({"what": what, "found": f"would save {percent(saved.value)} of an epoch"})


def _best(rank: Evidence, probes: Iterable[str]) -> Shown | None:
    """Of several probes the certain one that saves most."""
    shown = [found for found in map(rank.shown, probes) if found is not None and found.is_certain]
    return max(shown, key=lambda found: found.share.value, default=None)


def _largest(rank: Evidence, probes: Iterable[str]) -> Shown | None:
    """Of several probes the one that saves most, certain or not."""
    return max(filter(None, map(rank.shown, probes)), key=lambda found: found.share.value, default=None)


def _compute(findings: Findings, rank: Evidence, kind: str) -> None:
    switches = rank.rank.get("switches", {})
    merged = [name for name in switches if name.startswith("micro_batch_x")]
    for probe in switches:
        if probe in merged:
            continue
        shown = rank.shown(probe)
        if shown is not None:
            judged(findings, shown, lambda shown=shown: switch_advice.of_switch(shown, gain(shown.share), rank.rank))
    best = _best(rank, merged)
    best = best or _largest(rank, merged)
    if best is not None:
        judged(findings, best, lambda: advice.micro_batch(best, gain(best.share), rank))


def _ranks(findings: Findings, ranks: list[Evidence]) -> None:
    """The slowest rank, and what exchanging gradients costs."""
    if len(ranks) == 1:
        return
    own = [own_times(rank) for rank in ranks]
    rounds = min(map(len, own))
    if not rounds:
        return
    step_s = ranks[0].as_is_step_s.value
    means = [sorted(times)[len(times) // 4] for times in own]
    slowest = max(range(len(ranks)), key=lambda rank: means[rank])
    others = [value for rank, value in enumerate(means) if rank != slowest]
    behind = [
        (
            own[slowest][number]
            - sorted(own[rank][number] for rank in range(len(ranks)) if rank != slowest)[len(others) // 2]
        )
        / step_s
        for number in range(rounds)
    ]
    often = sum(value > 0 for value in behind) / rounds
    ordered = sorted(behind)
    share = Interval(ordered[rounds // 2], ordered[rounds // 8], ordered[-1 - rounds // 8])
    if share.value >= SLOWER_RANK and often >= SLOWEST_OFTEN and share.low > 0:
        findings.add(advice.slow_rank(share, gain(share), ranks, slowest, means))
    else:
        found = (
            f"rank {slowest} is the slowest by {percent(max(0.0, share.value))} of a step, in {often:.0%} of the rounds"
        )
        findings.fine.append({"what": "speed of the ranks", "found": found})
    exchange = ranks[slowest].shown("no_gradient_exchange")
    if exchange is not None:
        judged(findings, exchange, lambda: advice.communication(exchange, gain(exchange.share), len(ranks)))


def own_times(rank: Evidence) -> list[float]:
    """Seconds of a step that a rank takes by itself, by round: without waiting for the others."""
    free = rank.windows("no_gradient_exchange")
    if free:
        return [window["wall_s"] / window["steps"] for window in free]
    profile = rank.rank.get("profile") or {}
    windows = rank.windows("no_gradient_exchange", is_changed=False) or rank.as_is()
    if rank.rank["facts"]["device"] != "cpu":
        # Ranks that wait are busy in NCCL's kernels: the slowest is the one that is least.
        waiting = profile.get("nccl_s", 0.0) / max(profile.get("wall_s", 1.0), 1e-9)
        return [window["wall_s"] / window["steps"] * (1 - waiting) for window in windows]
    return [(window["wall_s"] - window["phases_s"].get("communication", 0.0)) / window["steps"] for window in windows]
