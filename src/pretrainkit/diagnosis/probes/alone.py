"""Parts of the program measured by themselves, after the loop has been stopped: its loader, its attention."""

from __future__ import annotations

import time
from statistics import median_high
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pretrainkit.diagnosis.observe.streams import OtherLoader, time_epoch_starts

if TYPE_CHECKING:
    from pretrainkit.diagnosis.observe.session import Session

WORKERS = (0, 2, 4, 8)
LONGEST_LOADER_S = 1.5
MOST_BATCHES = 64
ATTENTION_REPEATS = 20
EPOCH_STARTS = 3


def loader_settings(session: Session, loader: Any) -> dict[str, dict[str, Any]]:
    """Changes of a loader that are worth trying in the loop: probe -> DataLoader arguments."""
    most = max(2, session.num_cpus)
    settings: dict[str, dict[str, Any]] = {
        f"workers_{count}": {"num_workers": count}
        for count in WORKERS
        if count not in (0, loader.num_workers) and count <= most
    }
    if loader.num_workers:
        settings["prefetch"] = {"prefetch_factor": 4 * (loader.prefetch_factor or 2)}
    if session.on_gpu and not loader.pin_memory:
        settings["pinned_memory"] = {"pin_memory": True}
    return settings


def measure_alone(session: Session) -> None:
    """Write down the loader's own speed with several settings, and the time of each attention kernel."""
    loader, wants = session.loop.loader, session.spec.wants
    session.write(attention_alone=session.attention_alone)
    if loader is not None and wants("loader_alone"):
        with session.ignoring_errors("the loader alone"):
            session.write(loader_alone=_loaders(session, loader))
    if loader is not None and wants("persistent_workers") and loader.num_workers and not loader.persistent_workers:
        with session.ignoring_errors("the start of an epoch"):
            new, kept = time_epoch_starts(loader, EPOCH_STARTS)
            session.write(epoch_starts={"new_s": new, "kept_s": kept})


def _loaders(session: Session, loader: Any) -> list[dict[str, Any]]:
    """Batches per second for each setting, after the first batch; and the time until that came."""
    now = loader.num_workers
    tried: dict[str, dict[str, Any]] = {f"{now} workers (now)": {}}
    for count in WORKERS:
        if count != now and count <= max(2, session.num_cpus):
            tried[f"{count} workers"] = {"num_workers": count}
    if now:
        tried["prefetch_factor 8"] = {"prefetch_factor": 8}
    if session.on_gpu:
        tried[f"pin_memory={not loader.pin_memory}"] = {"pin_memory": not loader.pin_memory}
    found = []
    for name, changed in tried.items():
        other = OtherLoader(loader, **changed)
        begin_s = time.perf_counter()
        next(other)
        first_s = time.perf_counter() - begin_s
        # The queue that filled meanwhile is no measure of the loader's speed.
        for _ in range(min(other.depth, MOST_BATCHES)):
            next(other)
        count, begin_s = 0, time.perf_counter()
        while count < MOST_BATCHES and (count < 2 or time.perf_counter() - begin_s < LONGEST_LOADER_S / len(tried) * 2):
            next(other)
            count += 1
        elapsed_s = time.perf_counter() - begin_s
        other.close()
        found.append({"settings": name, "first_batch_s": first_s, "batches_per_second": count / elapsed_s})
    return found


def time_attention(session: Session) -> list[dict[str, Any]]:
    """Forward and backward of each kernel on the shapes of the loop's first call."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    seen = session.loop.attention
    shape_q, shape_k = seen["query"], seen["key"]
    if len(shape_q) != 4:
        return []
    dtype = getattr(torch, seen["dtype"])
    query = torch.randn(shape_q, dtype=dtype, device=session.device, requires_grad=True)
    key, value = (torch.randn(shape_k, dtype=dtype, device=session.device, requires_grad=True) for _ in range(2))
    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    if session.on_gpu:
        kinds |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION}
    found = []
    for name, kind in kinds.items():
        try:
            with torch.enable_grad(), sdpa_kernel([kind]):
                elapsed_s = _time_attention(session, query, key, value)
            found.append({"kernel": name, "milliseconds": elapsed_s * 1e3})
        except RuntimeError as error:
            found.append({"kernel": name, "why_not": str(error).splitlines()[0]})
    return found


def _time_attention(session: Session, query: Any, key: Any, value: Any) -> float:
    times = []
    for _ in range(ATTENTION_REPEATS):
        session.synchronize()
        begin_s = time.perf_counter()
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        out.sum().backward()
        session.synchronize()
        times.append(time.perf_counter() - begin_s)
    return median_high(times)
