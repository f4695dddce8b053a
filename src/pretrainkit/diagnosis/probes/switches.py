"""The changes of settings that are tried inside the running program: each is one thing, and can be taken back.

Only what torch changes within a moment; anything else is seen and advised (`causes.py`), or needs another start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pretrainkit.diagnosis.observe import batches
from pretrainkit.diagnosis.observe.session import Session

WORTH_A_LOOK = 0.02
"""Share of the step that a phase must take for its changes to be tried."""
LARGEST_MERGED_SHARE = 0.8
"""Of the GPU's memory that a larger micro batch may be expected to take."""
WORKERS = (2, 4, 8)
EXCHANGE = "no_gradient_exchange"


@dataclass(frozen=True)
class Switch:
    """A change: B windows are measured with it on, A windows with it off, over the same kept batches."""

    turn: Callable[[bool], object] = lambda is_on: None
    """Makes the change, or takes it back."""
    seen: list[Any] | None = None
    """Batches to replay instead of the kept ones: the same samples arranged otherwise."""
    num_workers: int = 0
    """Of another DataLoader over the loop's dataset, to read from."""
    reads_data: bool = False
    """Both windows read data, in place of kept batches."""
    likely: float = 0.1
    """Share of the step that it may save, by what was seen: the likely ones are measured first."""
    detail: str = ""
    """What exactly is changed, for the report."""


Built = Switch | str
"""A switch, or why it doesn't apply here."""


def build(
    session: Session, kept: list[Any], seen: list[Any], data_share: float
) -> tuple[dict[str, Switch], dict[str, str]]:
    """Switches for the program as it is now, likely ones first, and why others don't apply.

    Args:
        session: the rank.
        kept: the batches that are replayed.
        seen: all batches that were seen.
        data_share: share of the step that reading takes at least, by the data probe.
    """
    builders: dict[str, Callable[[], Built]] = {
        "packing": partial(_packing, kept, seen),
        "larger_micro_batch": partial(_merging, session, kept),
        "attention": partial(_attention, session),
        "tf32": partial(_tf32, session),
        "threads": partial(_threads, session),
        "anomaly_detection": _anomaly_detection,
        **{f"workers_{count}": partial(_workers, session, count, data_share) for count in WORKERS},
        EXCHANGE: partial(_no_gradient_exchange, session),
    }
    built: dict[str, Built] = {}
    for name, builder in builders.items():
        try:
            # Without it no rank's own speed is known.
            is_wanted = session.spec.wants(name) or (name == EXCHANGE and name not in session.spec.excluded)
            built[name] = builder() if is_wanted else "left out"
        except Exception as error:
            built[name] = f"can't be tried: {error}"
    switches = {name: item for name, item in built.items() if isinstance(item, Switch)}
    return (
        dict(sorted(switches.items(), key=lambda item: -item[1].likely)),
        {name: item for name, item in built.items() if isinstance(item, str)},
    )


def _packing(kept: list[Any], seen: list[Any]) -> Built:
    """The kept batches' tokens in rows as wide as the widest batch that was seen: that of the longest samples."""
    if not any(batches.token_ids(batch) is not None for batch in kept):
        return "the loop's batches are no dicts with input_ids"
    if not batches.can_be_packed(kept):
        return "no padding"
    work = batches.mean_work(kept)
    packed = batches.packed(kept, max(ids.shape[1] for ids in map(batches.token_ids, seen) if ids is not None))
    detail = f"{batches.measure(packed[0])['shape'][1]} tokens"
    return Switch(seen=packed, likely=1 - work["real_tokens"] / work["tokens"], detail=detail)


def _merging(session: Session, kept: list[Any]) -> Built:
    if session.spec.source == "experiment":
        return "tried by starting the run with another micro_batch_size"
    if len(kept) < 2:
        return "a window holds one micro batch"
    if not batches.can_be_merged(kept):
        return "the loop's batches can't be joined"
    if session.on_gpu and torch.cuda.max_memory_allocated() * 2 > LARGEST_MERGED_SHARE * torch.cuda.mem_get_info()[1]:
        return "too little GPU memory"
    return Switch(seen=[batches.merged(kept[index : index + 2]) for index in range(0, len(kept) - 1, 2)], likely=0.2)


def _attention(session: Session) -> Built:
    """Any kernel that torch chooses, where the plain one is used."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    models = [model for root in session.modules for model in (root, getattr(root, "module", None))]
    configs = [getattr(model, "config", None) for model in models]
    eager: list[Any] = [config for config in configs if getattr(config, "_attn_implementation", None) == "eager"]
    used = "eager" if eager else session.attention
    if used not in ("eager", "math"):
        return f"attention is {used}" if used else "scaled_dot_product_attention isn't called"
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def turn(is_on: bool) -> None:
        session.attention_context = partial(sdpa_kernel, kinds) if is_on else contextlib.nullcontext
        for config in eager:
            config._attn_implementation = "sdpa" if is_on else "eager"

    return Switch(turn, likely=0.3, detail=used)


def _tf32(session: Session) -> Built:
    """float32 matrix products on tensor cores."""
    if not session.on_gpu:
        return "CUDA only"
    if torch.cuda.get_device_capability()[0] < 8:
        return "this GPU has no TF32"
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if precision != "highest":
        return "on already"

    def turn(is_on: bool) -> None:
        torch.set_float32_matmul_precision("high" if is_on else precision)
        torch.backends.cudnn.allow_tf32 = is_on or cudnn

    return Switch(turn, likely=0.3)


def _threads(session: Session) -> Built:
    now, cores = torch.get_num_threads(), session.num_cpus
    if now == cores:
        return f"{now} threads on {cores} cores"
    detail = f"{cores} threads instead of {now}"
    return Switch(lambda is_on: torch.set_num_threads(cores if is_on else now), likely=0.4, detail=detail)


def _anomaly_detection() -> Built:
    """Without autograd's search for NaN."""
    if not torch.is_anomaly_enabled():
        return "off"
    check_nan = torch.is_anomaly_check_nan_enabled()
    return Switch(lambda is_on: torch.autograd.set_detect_anomaly(not is_on, check_nan), likely=0.5)


def _workers(session: Session, count: int, data_share: float) -> Built:
    loader = session.loader
    if loader is None:
        return "no DataLoader"
    if data_share < WORTH_A_LOOK:
        return "reading data takes no time that could be saved"
    if loader.num_workers == count:
        return "as it is"
    if count > max(2, session.num_cpus):
        return f"{session.num_cpus} cores"
    return Switch(num_workers=count, reads_data=True, likely=data_share, detail=f"{count} workers")


def _no_gradient_exchange(session: Session) -> Built:
    """DistributedDataParallel without its all-reduce: every rank runs at its own speed."""
    from torch.nn.parallel import DistributedDataParallel

    if session.world_size == 1:
        return "one rank"
    modules = [root for root in session.modules if isinstance(root, DistributedDataParallel)]

    def turn(is_on: bool) -> None:
        for module in modules:
            module.require_backward_grad_sync = not is_on

    return Switch(turn, reads_data=True, likely=0.4) if modules else "no DistributedDataParallel"
