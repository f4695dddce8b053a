"""The causes of lost time: one row each, with the phase it is in and what the report says about it.

A probe measures it (`probes/`, `diagnose.py`), `findings.py` ranks it. What is only seen and not measured is a row of
`checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pretrainkit.diagnosis.statistics import Interval

MEASURED, AT_MOST, ESTIMATED = "measured", "at most", "estimated"
"""How a gain is known: the change was made; more was taken away than the change does; by other numbers."""


@dataclass(frozen=True)
class Row:
    """A cause as the report shows it; texts take facts in braces."""

    probe: str
    """What is checked, in words."""
    phase: str
    """Of a step, that it takes its time in."""
    title: str
    seen: str
    change: str
    gain: str = "with the change: {gain}"
    known: str = MEASURED
    is_option: bool = False
    """The change gives other numbers, or another batch."""


_SMALL = "micro batches are too small for the processor"
_MADE = "with the batches ready-made: {gain}"
CAUSES: dict[str, Row] = {
    "packing": Row(
        "padding",
        "forward, backward",
        "padding is computed",
        "{padding} of the tokens are padding, in {shapes} shapes",
        "pack samples into full rows (tools/pack_dataset.py, or .bin/.idx), or batch rows of like length "
        "(Trainer: train_sampling_strategy='group_by_length')",
        "the same tokens in full rows of {detail}: {gain}",
    ),
    "tokenizing": Row(
        "tokenizing",
        "data",
        "text is tokenized inside the loop",
        "{tokenizer_share:.0%} of the time for data is spent in a tokenizer, at {where}",
        "tokenize once, before training: tools/preprocess_data.py (.bin/.idx) or tools/pack_dataset.py (Arrow)",
        "the tokenizer's part of what ready-made batches save: {gain}",
        ESTIMATED,
    ),
    "workers": Row(
        "workers of the loader",
        "data",
        "batches are made by too few processes ({num_workers} workers)",
        "the loop waits while batches are made, most of all at {where}",
        "{change}",
        "batches made by workers: {gain}",
    ),
    "data": Row(
        "waiting for data",
        "data",
        "data comes slower than the model takes it",
        "{num_workers} workers; most of the waiting is at {where}{tried}",
        "{change}",
        _MADE,
        AT_MOST,
    ),
    "larger_micro_batch": Row(
        "micro batch",
        "forward, backward",
        _SMALL,
        "{size:g} samples of a micro batch take almost as long as {larger:g}",
        "micro batch {size:g} -> {larger:g}, gradient accumulation {accumulated}: the same global batch",
        "time per sample, two micro batches joined: {gain}",
    ),
    "larger_batch": Row(
        "batch",
        "forward, backward",
        "batches are too small for the processor",
        "{size:g} samples of a batch take almost as long as {larger:g}",
        "batch {size:g} -> {larger:g}, which changes the training",
        "time per sample, two batches joined: {gain}",
        is_option=True,
    ),
    "micro_batch": Row(
        "micro batch",
        "forward, backward",
        _SMALL,
        "the run was started with --micro_batch_size {larger} in turn with {size}",
        "--micro_batch_size {larger} (the global batch stays as it is)",
    ),
    "attention": Row(
        "attention kernel",
        "forward, backward",
        "a slow attention kernel is used",
        "attention runs as {detail}",
        'attn_implementation="sdpa", no sdpa_kernel(MATH), no dense mask where is_causal=True will do',
    ),
    "tf32": Row(
        "TF32",
        "forward, backward",
        "TF32 is off",
        "float32 matrix products run without tensor cores",
        'torch.set_float32_matmul_precision("high")',
    ),
    "threads": Row(
        "CPU threads",
        "forward, backward",
        "a wrong number of CPU threads",
        "it could compute with {detail}",
        "OMP_NUM_THREADS (torchrun sets 1 where it is not set), or torch.set_num_threads: {detail}",
    ),
    "logging": Row(
        "logging and reading values",
        "other",
        "logging holds up every step",
        "the loop prints or reads values of tensors: {where}",
        "log every 10 to 100 steps; keep values on the device (no .item(), no print) until then",
        "the time between optimizer and data that it takes: {gain}",
        AT_MOST,
    ),
    "anomaly_detection": Row(
        "anomaly detection",
        "forward, backward",
        "autograd's anomaly detection is on",
        "torch.is_anomaly_enabled()",
        "remove torch.autograd.set_detect_anomaly(True)",
    ),
    "debug_variables": Row(
        "debug variables",
        "all",
        "debug settings are left on",
        "in the environment: {listed}",
        "unset {names}",
    ),
    "slow_rank": Row(
        "speed of the ranks",
        "{phase}",
        "rank {rank} on {host} is slower than the others",
        "by itself it takes {own_s:.3g} s a step, the others {others_s:.3g} s and more; "
        "it loses the time in {phase}{where}",
        "look at rank {rank}: its data, its GPU's clocks and neighbours, its cores",
        "were it as fast as the others: {gain}",
        ESTIMATED,
    ),
    "no_gradient_exchange": Row(
        "exchange of gradients",
        "communication",
        "ranks spend time on exchanging gradients",
        "{ranks} ranks, DistributedDataParallel",
        "exchange less often (gradient accumulation under no_sync()), larger buckets, bf16 gradients; "
        "check the network (NCCL_DEBUG=INFO)",
        "without any exchange: {gain}",
        AT_MOST,
        is_option=True,
    ),
}
"""Name -> row; probes have the names of their rows."""


@dataclass(frozen=True)
class Cause:
    """One way in which time is lost, or could be gained."""

    name: str
    title: str
    phase: str
    share: Interval
    """Of the step time as it is, between 0 and 1."""
    seen: str
    change: str
    """What to do: a flag or a line."""
    gain: str
    known: str
    """How the gain is known."""
    is_option: bool


def percent(share: Interval) -> str:
    """A share with its interval, for people."""
    share = share.within_bounds()
    return f"{share.value:.1%} [{share.low:.1%} to {share.high:.1%}]"


def cause(name: str, share: Interval, known: str = "", **facts: Any) -> Cause:
    """The cause of a row, its texts filled with facts."""
    share, row = share.within_bounds(), CAUSES[name]
    times = " to ".join(f"{1 / max(1 - end, 0.01):.2f}" for end in (share.low, share.high))
    facts["gain"] = f"{percent(share)} of the step time, {times} times as fast"
    texts = (part.format(**facts) for part in (row.title, row.phase, row.seen, row.change, row.gain))
    title, phase, seen, change, gain = texts
    return Cause(name, title, phase, share, seen, change, gain, known or row.known, row.is_option)
