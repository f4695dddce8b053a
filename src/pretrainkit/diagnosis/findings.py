"""From what the probes have shown to causes, ranked by their share of the step time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

from pretrainkit.diagnosis.causes import AT_MOST, CAUSES, MEASURED, Cause, cause, percent
from pretrainkit.diagnosis.checks import FINE, NOT_APPLICABLE, UNCERTAIN, Check
from pretrainkit.diagnosis.evidence import WORTH_TELLING, Evidence, Shown, step_s
from pretrainkit.diagnosis.speed import padding_of
from pretrainkit.diagnosis.statistics import Interval

WORKERS = ("workers_2", "workers_4", "workers_8")
TOKENIZING_SHARE = 0.5
"""Of the time for data that must be spent in a tokenizer for that to be the cause."""
LITTLE = 0.05
"""A change that saves less than this for certain is not worth making."""
SLOWER_RANK = 0.05
SLOWEST_OFTEN = 0.8
"""Share of the rounds in which the same rank must be the slowest."""
IN_MEMORY = ("TensorDataset", "list", "Subset", "ListDataset")
"""Datasets whose samples are there already: nothing to prepare."""


@dataclass
class Findings:
    """All that the probes have shown."""

    causes: list[Cause] = field(default_factory=list)
    """Largest share first."""
    options: list[Cause] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    """What is no cause: it costs nothing, couldn't be shown, or doesn't apply."""

    def add(self, cause: Cause) -> None:
        """Put a cause or option in its place, by its share."""
        listed = self.options if cause.is_option else self.causes
        listed.append(cause)
        listed.sort(key=lambda cause: -cause.share.value)

    def judge(self, shown: Shown, cause: Cause | None) -> None:
        """Add the cause if its probe has shown it for certain, or note that it is fine or uncertain."""
        found = f"the change would save {percent(shown.share)}"
        if cause and not shown.doubt and shown.share.value >= WORTH_TELLING:
            self.add(cause)
        elif shown.share.high < LITTLE:
            self.note(FINE, shown.probe, found)
        else:
            self.note(UNCERTAIN, shown.probe, f"{found}; {shown.doubt or 'too wide an interval'}")

    def note(self, state: str, probe: str, found: str) -> None:
        """Note what a probe has found."""
        name = "workers" if probe in WORKERS else probe
        what = CAUSES[name].probe + (f" ({probe.rpartition('_')[2]})" if probe in WORKERS else "")
        self.checks.append(Check(what, state, found))


def find(ranks: list[Evidence], *, kind: str) -> Findings:
    """What the windows of all ranks show; `kind` is that of the program."""
    findings, first = Findings(), ranks[0]
    _data(findings, first, kind)
    for name, detail in first.rank["switches"].items():
        if name in WORKERS or name == "no_gradient_exchange":
            continue
        shown = first.shown(name)
        if shown is None:
            findings.note(UNCERTAIN, name, "not measured: no time was left (--budget_s)")
        else:
            findings.judge(shown, _of_switch(shown, first, detail))
    _logging(findings, first)
    if len(ranks) > 1:
        _ranks(findings, ranks)
    for name, why in first.rank["why_not"].items():
        if why != "left out" and name not in WORKERS:
            findings.note(NOT_APPLICABLE, name, why)
    return findings


def _most_seen(samples: Iterable[dict[str, Any]], phase: str) -> str:
    """The function that most of a phase was spent in, "" when none was seen."""
    places: Counter[str] = Counter()
    for sample in samples:
        places[sample["where"]] += sample["count"] * (sample["phase"] == phase)
    where, count = max(places.items(), key=lambda item: item[1], default=("", 0))
    return where if count else ""


def _data(findings: Findings, rank: Evidence, kind: str) -> None:
    """Time for data, put down to the tokenizer, the workers or reading itself: nothing counts twice."""
    data = rank.data()
    if data.doubt or data.share.value < WORTH_TELLING:
        findings.judge(data, None)
        return
    loader = rank.rank["facts"]["loader"]
    # Where there are workers, the loop itself only waits for them.
    samples = rank.rank.get("worker_samples") or rank.rank["observed"]["samples"]
    of_data = [sample for sample in samples if sample["phase"] == "data"]
    tokenizer_share = sum(sample["count"] * sample["is_tokenizer"] for sample in of_data) / max(
        1, sum(sample["count"] for sample in of_data)
    )
    where = _most_seen(of_data, "data") or "its reading"
    tried = [shown for shown in map(rank.shown, WORKERS) if shown is not None]
    best = max((shown for shown in tried if not shown.doubt), key=lambda shown: shown.share.value, default=None)
    more = max(tried, key=lambda shown: shown.share.value, default=None)
    facts = {"where": where, "num_workers": loader.get("num_workers", 0)}
    is_in_memory = loader.get("dataset") in IN_MEMORY
    if tokenizer_share >= TOKENIZING_SHARE:
        share = data.share.scaled(tokenizer_share)
        findings.add(cause("tokenizing", share, tokenizer_share=tokenizer_share, where=where))
    elif best is not None and best.share.value >= data.share.value / 3:
        findings.add(cause("workers", best.share, MEASURED, change=_more_workers(kind, best), **facts))
    elif not (facts["num_workers"] or is_in_memory) and (more is None or more.share.high > data.share.value / 3):
        findings.add(cause("workers", data.share, AT_MOST, change=_more_workers(kind, more), **facts))
    else:
        seen = "; ".join(f"with {shown.probe[-1]} workers {percent(shown.share)} less" for shown in tried)
        change = _cheaper_data(kind, loader, bool(tried))
        findings.add(cause("data", data.share, tried=f"; {seen}" if seen else "", change=change, **facts))


def _more_workers(kind: str, shown: Shown | None) -> str:
    count = shown.probe.rpartition("_")[2] if shown else 2
    if kind == "experiment":
        return f"--num_workers {count}"
    return f"DataLoader(..., num_workers={count}, persistent_workers=True) (Trainer: dataloader_num_workers)"


def _cheaper_data(kind: str, loader: dict[str, Any], has_tried_workers: bool) -> str:
    """What can be done about slow data, by what it is."""
    if kind == "experiment":
        return "--num_workers; .bin/.idx or shards on a local or striped file system"
    if loader.get("dataset") in IN_MEMORY:
        return (
            f"take a whole batch out of the {loader['dataset']} at once (index with a list), without collating samples"
        )
    more = "" if loader.get("num_workers") or has_tried_workers else "num_workers in DataLoader; "
    return f"{more}make samples cheaper to read: decode and clean once, before training, and store the result locally"


def _logging(findings: Findings, rank: Evidence) -> None:
    """What the loop does between the phases, where its own code reads values or prints."""
    reads = rank.rank["observed"]["reads"]
    share = rank.phase_share("other") if reads else Interval(0.0, 0.0, 0.0)
    if share.low < WORTH_TELLING:
        findings.note(FINE if share.high < LITTLE else UNCERTAIN, "logging", f"takes {percent(share)} of a step")
        return
    most = sorted(reads, key=lambda where: -reads[where])[:3]
    findings.add(cause("logging", share, where="; ".join(most)))


def _of_switch(shown: Shown, rank: Evidence, detail: str) -> Cause:
    """The cause that a change has shown."""
    padding = padding_of(rank.rank)
    size, per_step = rank.rank["kept"]["samples"], rank.micro_batches_per_step
    return cause(
        "larger_batch" if shown.probe == "larger_micro_batch" and per_step < 2 else shown.probe,
        shown.share,
        detail=detail,
        size=size,
        larger=2 * size,
        accumulated=f"{per_step:g} -> {max(1, per_step / 2):g}",
        padding=f"{padding['share']:.0%}" if padding else "",
        shapes=padding["distinct_shapes"] if padding else 0,
    )


def _ranks(findings: Findings, ranks: list[Evidence]) -> None:
    """The slowest rank, and what exchanging gradients costs."""
    if ranks[0].rank["facts"]["device"] != "cpu" and "no_gradient_exchange" not in ranks[0].rank["pairs"]:
        findings.note(NOT_APPLICABLE, "slow_rank", "on GPUs it is seen under DistributedDataParallel alone")
        return
    own = [own_times(rank) for rank in ranks]
    rounds = min(map(len, own))
    as_is_s = ranks[0].as_is_step_s.value
    means = [sorted(times)[len(times) // 4] for times in own]
    slowest = means.index(max(means))
    others = [times for rank, times in enumerate(own) if rank != slowest]
    # In each round, behind the middle one of the others.
    rows = zip(own[slowest], *others, strict=False)
    behind = sorted((slow_s - median_high(others_s)) / max(as_is_s, slow_s) for slow_s, *others_s in rows)
    often = sum(value > 0 for value in behind) / rounds
    share = Interval(behind[rounds // 2], behind[rounds // 8], behind[-1 - rounds // 8])
    if share.value >= SLOWER_RANK and often >= SLOWEST_OFTEN and share.low > 0:
        # The others do their part of the exchange while they wait. Ranks that arrive together do all of it then.
        exchange_s = max(0.0, as_is_s - median_high(own[slowest]))
        low = max(0.0, share.low - exchange_s / as_is_s)
        findings.add(_slow_rank(Interval(share.value, low, share.high), ranks, slowest, means))
    else:
        behind_by = f"rank {slowest} is the slowest by {max(0.0, share.value):.1%} of a step"
        state = FINE if share.high < SLOWER_RANK else UNCERTAIN
        findings.note(state, "slow_rank", f"{behind_by}, in {often:.0%} of {rounds} rounds")
    exchange = ranks[slowest].shown("no_gradient_exchange")
    if exchange is not None:
        findings.judge(exchange, cause("no_gradient_exchange", exchange.share, ranks=len(ranks)))


def _slow_rank(share: Interval, ranks: list[Evidence], slowest: int, own_s: list[float]) -> Cause:
    """One rank is slower than the others, which wait for it."""
    spent = [_phases(rank) for rank in ranks]
    others = [item for number, item in enumerate(spent) if number != slowest]
    phase = max(
        (name for name in spent[slowest] if name != "communication"),
        key=lambda name: spent[slowest][name] - sum(item.get(name, 0.0) for item in others) / len(others),
        default="compute",
    )
    rank = ranks[slowest].rank
    where = _most_seen(rank["observed"]["samples"], phase)
    return cause(
        "slow_rank",
        share,
        rank=slowest,
        host=rank["host"],
        own_s=own_s[slowest],
        others_s=min(value for number, value in enumerate(own_s) if number != slowest),
        phase=phase,
        where=f", most of it at {where}" if where else "",
    )


def _phases(rank: Evidence) -> Counter[str]:
    """Seconds of each phase of a step, where the rank runs free if there are such windows."""
    windows = rank.windows("no_gradient_exchange") or rank.as_is()
    spent: Counter[str] = Counter()
    for window in windows:
        spent.update({name: seconds / window["steps"] / len(windows) for name, seconds in window["phases_s"].items()})
    return spent


def own_times(rank: Evidence) -> list[float]:
    """Seconds of a step that a rank takes by itself, by round: without waiting for the others."""
    free = rank.windows("no_gradient_exchange")
    if free:
        return [step_s(window) for window in free]
    return [
        (window["wall_s"] - window["phases_s"].get("communication", 0.0)) / window["steps"] for window in rank.as_is()
    ]
