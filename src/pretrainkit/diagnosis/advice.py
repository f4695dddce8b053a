"""What to do about each cause, in words: the title, what was seen, the flag or line to change, the measured gain."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pretrainkit.diagnosis.evidence import Evidence, Shown
from pretrainkit.diagnosis.speed import padding_of
from pretrainkit.diagnosis.statistics import Interval

_OPTIONS = ("bf16", "compile", "recomputation", "larger_batch", "communication")
"""Causes whose change gives other numbers, memory or batches."""
_READY_MADE = "with the same batches ready-made: {gain}"
_TOO_SMALL = "micro batches are too small for the processor"
_TEXTS: dict[str, tuple[str, ...]] = {
    # name: title, what was seen, change, what was measured (without one: with the change)
    "tokenizing": (
        "text is tokenized inside the loop",
        "{tokenizer_share:.0%} of the time for data is spent in a tokenizer, at {where}",
        "tokenize once, before training: tools/preprocess_data.py (.bin/.idx) or tools/pack_dataset.py (Arrow)",
        _READY_MADE,
    ),
    "no workers": (
        "data is fetched by the process that trains (0 workers)",
        "the model waits while a batch is made, most of all at {where}",
        "{change}",
        _READY_MADE + "{tried}",
    ),
    "loader": (
        "data is fetched by {num_workers} workers",
        "the loop waits for batches, most of all at {where}",
        "{change}",
        "with {flag}: {gain}",
    ),
    "persistent_workers": (
        "the loader's workers are started again for every epoch",
        "{new_s:.2g} s until the first batch of an epoch of {batches} batches",
        "DataLoader(..., persistent_workers=True) (Trainer: dataloader_persistent_workers=True)",
        "time of an epoch with workers that stay: {gain}",
    ),
    "new_shapes": (
        "every new shape of a batch is compiled again",
        "{shapes} shapes in {batches} batches; {compiled} graphs were compiled in these steps",
        "batches of one shape (packed, or pad_to_multiple_of), or torch.compile(dynamic=True)",
        "with shapes that were seen before: {gain}",
    ),
    "data": (
        "data comes slower than the model takes it",
        "{num_workers} workers; most of the waiting is at {where}{tried}",
        "make the samples cheaper to read: decode and clean once, before training; store token ids "
        "(tools/preprocess_data.py), on a local or striped file system",
        _READY_MADE,
    ),
    "joined micro batches": (
        _TOO_SMALL,
        "{size:g} samples of a micro batch take almost as long as {larger:g}",
        "micro batch {size:g} -> {larger:g}{change}",
        "time per sample, {factor} micro batches joined: {gain}",
    ),
    "micro_batch": (
        _TOO_SMALL,
        "the run was started with --micro_batch_size {larger} in turn with {size}",
        "--micro_batch_size {larger} (the global batch stays as it is)",
        "with it: {gain}",
    ),
    "slow_rank": (
        "rank {rank} on {host} is slower than the others",
        "by itself it takes {own_s:.3g} s a step, the others {others_s:.3g} s and more; "
        "it loses the time in {phase}{where}",
        "look at rank {rank}: its data, its GPU's clocks and neighbours, its cores",
        "were it as fast as the others: {gain}",
    ),
    "communication": (
        "ranks spend time on exchanging gradients",
        "{ranks} ranks, DistributedDataParallel",
        "exchange less often (gradient accumulation under no_sync()), larger buckets, bf16 gradients; "
        "check the network (NCCL_DEBUG=INFO)",
        "without the exchange: {gain}",
    ),
    "debug_variables": (
        "debug settings are left on",
        "in the environment: {listed}",
        "unset {names}",
        "without them: {gain}",
    ),
    "save_interval": (
        "checkpoints are saved too often",
        "saving takes {seconds:.3g} s, every {interval} steps",
        "--save_interval {wanted}",
        "every {wanted} steps it takes 1% of the time",
    ),
    "packing": (
        "padding is computed",
        "{padding} of the tokens are padding, in {shapes} different shapes",
        "pack samples into full rows (tools/pack_dataset.py, or .bin/.idx), or sort by length within a window",
    ),
    "attention": (
        "a slow attention kernel is used",
        "attention runs as {attention}",
        'use {detail}: attn_implementation="sdpa", no sdpa_kernel(MATH), no dense mask where is_causal=True will do',
    ),
    "tf32": (
        "TF32 is off",
        "float32 matrix products run without tensor cores",
        'torch.set_float32_matmul_precision("high")',
    ),
    "bf16": (
        "float32 instead of bf16",
        "the model computes in float32",
        'with torch.autocast("cuda", torch.bfloat16): around the forward pass (Trainer: bf16=True)',
    ),
    "fused_optimizer": (
        "the optimizer runs parameter by parameter",
        "its step takes a visible part of the time",
        "torch.optim.AdamW(..., fused=True)",
    ),
    "threads": (
        "a wrong number of CPU threads",
        "it could compute with {detail}",
        "OMP_NUM_THREADS (torchrun sets 1 where it is not set), or torch.set_num_threads: {detail}",
    ),
    "cpu_binding": (
        "the process is bound to too few cores",
        "it could use {detail}",
        "taskset, numactl or the scheduler's --cpus-per-task: {detail}",
    ),
    "logging": (
        "logging holds up every step",
        "in every step: {loggers}",
        "log every 10 to 100 steps; keep values on the device (no .item(), no print) until then",
    ),
    "checkpoint_writes": (
        "saving holds up the steps",
        "files were saved in the steps that were watched",
        "save less often",
    ),
    "anomaly_detection": (
        "autograd's anomaly detection is on",
        "torch.is_anomaly_enabled()",
        "remove torch.autograd.set_detect_anomaly(True)",
    ),
    "deterministic": (
        "deterministic algorithms are forced",
        "torch.are_deterministic_algorithms_enabled()",
        "remove torch.use_deterministic_algorithms(True)",
    ),
    "recomputation": (
        "activations are computed twice",
        "torch.utils.checkpoint is used",
        "turn recomputation off, or on for fewer layers, if memory allows",
    ),
    "compile": (
        "torch.compile is not used",
        "the model's layers run operator by operator",
        "for layer in model.layers: layer.compile()",
    ),
}


@dataclass(frozen=True)
class Cause:
    """One way in which time is lost, or could be gained."""

    name: str
    title: str
    share: Interval
    """Of the step time as it is."""
    why: str
    """What was seen."""
    change: str
    """What to do: a flag or a line."""
    gain: str
    """What was measured with the change made."""
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def is_option(self) -> bool:
        """Whether the change gives other numbers, memory or batches."""
        return self.name in _OPTIONS

    def to_json(self) -> dict[str, Any]:
        """All fields; the share with its interval."""
        return {**asdict(self), "share": self.share.to_json()}


def percent(share: Interval) -> str:
    """A share with its interval, for people."""
    return f"{share.value:.1%} [{share.low:.1%} to {share.high:.1%}]"


def cause(text: str, shown: Shown | Interval, name: str = "", **facts: Any) -> Cause:
    """The cause that texts of a kind make with facts; its name is `text` unless another one is given."""
    share, evidence = (shown.share, shown.to_json()) if isinstance(shown, Shown) else (shown, {})
    facts["gain"] = f"step time -{percent(share)}, {1 / max(1 - share.value, 1e-3):.2f}x the speed"
    texts = (*_TEXTS[text], "with the change: {gain}")[:4]
    title, why, change, gain = (part.format(**facts) for part in texts)
    return Cause(name or text, title, share, why, change, gain, evidence)


def no_workers(share: Interval, tried: Shown | None, where: str, kind: str) -> Cause:
    """The process that trains also reads and decodes, one after the other."""
    count = tried.probe.rpartition("_")[2] if tried else "2"
    change = f"DataLoader(..., num_workers={count}, persistent_workers=True)"
    if kind == "experiment":
        change = f"--num_workers {count}"
    measured = f"; {with_workers(tried)}" if tried else ""
    made = cause("no workers", share, "workers", where=where, change=change, tried=measured)
    return made if tried is None else replace(made, evidence=tried.to_json())


def loader(shown: Shown, now: dict[str, Any], where: str, kind: str) -> Cause:
    """The loader could deliver faster with other settings."""
    name, count = shown.probe, shown.probe.rpartition("_")[2]
    flags = {"prefetch": f"prefetch_factor={4 * (now.get('prefetch_factor') or 2)}", "pinned_memory": "pin_memory=True"}
    flag = flags.get(name, f"num_workers={count}")
    change = f"DataLoader(..., {flag})"
    if name not in flags:
        name = "workers"
        change = f"--num_workers {count}" if kind == "experiment" else change
        change += "" if now.get("persistent_workers") else ", persistent_workers=True"
    return cause("loader", shown, name, num_workers=now.get("num_workers", 0), where=where, change=change, flag=flag)


def with_workers(tried: Shown) -> str:
    """What other numbers of workers did to the step time in the running loop."""
    return f"with {tried.probe.rpartition('_')[2]} workers: step time {-tried.share.value:+.1%}"


def micro_batch(shown: Shown, rank: Evidence) -> Cause:
    """Samples that are computed together are faster, each, than alone."""
    factor, per_step, size = int(shown.probe[-1]), rank.micro_batches_per_step, rank.rank["kept"]["samples"]
    name = "micro_batch"
    change = f", gradient accumulation {per_step:g} -> {max(1, per_step / factor):g}: the same global batch"
    if per_step < 2:
        name = "larger_batch"
        change = ": a larger global batch, which changes the training; or the same with shorter runs of the loop"
    return cause("joined micro batches", shown, name, factor=factor, size=size, larger=size * factor, change=change)


def slow_rank(share: Interval, ranks: list[Evidence], slowest: int, own_s: list[float]) -> Cause:
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
    made = cause(
        "slow_rank",
        share,
        rank=slowest,
        host=rank["host"],
        own_s=own_s[slowest],
        others_s=min(value for number, value in enumerate(own_s) if number != slowest),
        phase=phase,
        where=f", most of it at {places.most_common(1)[0][0]}" if places else "",
    )
    return replace(made, evidence={"rank": slowest, "own_step_s": own_s, "phase": phase})


def _phases(rank: Evidence) -> Counter[str]:
    """Seconds of each phase of a step, where the rank runs free if there are such windows."""
    windows = rank.windows("no_gradient_exchange") or rank.as_is()
    spent: Counter[str] = Counter()
    for window in windows:
        spent.update({name: seconds / window["steps"] / len(windows) for name, seconds in window["phases_s"].items()})
    return spent


def of_switch(shown: Shown, rank: dict[str, Any]) -> Cause:
    """The cause that a switch has shown."""
    observed, padding = rank["observed"], padding_of(rank)
    detail = rank["switches"][shown.probe]["detail"]
    return cause(
        shown.probe,
        shown,
        detail=detail,
        attention=", ".join((rank.get("profile") or {}).get("attention", {})) or "none",
        padding=f"{padding['share']:.0%}" if padding else "",
        shapes=len({tuple(batch["shape"]) for batch in observed["batches"]}),
        loggers="; ".join([*observed["loggers"], *observed["reads"]][:4]) or detail,
    )
