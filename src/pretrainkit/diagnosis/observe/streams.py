"""The batches a training loop gets: its loader's own, the same ones again, or those of a loader set otherwise."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data

from pretrainkit.diagnosis.observe import batches, phases
from pretrainkit.diagnosis.observe.session import Session

KEPT_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "worker_init_fn", "prefetch_factor", "generator"),
    "multiprocessing_context",
)


def replay(seen: list[Any]) -> Iterator[Any] | None:
    """Batches that were seen before, again and again, in containers of their own: data without the cost of reading."""
    return map(batches.copied, itertools.cycle(seen)) if seen else None


def depth_of(loader: Any) -> int:
    """Batches that a loader's workers fetch ahead."""
    return int(loader.num_workers * (loader.prefetch_factor or 2)) if loader is not None else 0


def reread(loader: Any, num_workers: int) -> Iterator[Any]:
    """The loop's dataset, sampler and collation under a plain DataLoader with other workers, again and again."""
    settings = {name: getattr(loader, name) for name in KEPT_SETTINGS} | {"num_workers": num_workers}
    if not num_workers:
        settings |= {"prefetch_factor": None, "multiprocessing_context": None}
    if isinstance(loader.dataset, torch.utils.data.IterableDataset) or loader.batch_sampler is None:
        settings["batch_size"] = loader.batch_size
        if loader.batch_size is not None:
            settings["drop_last"] = loader.drop_last
        if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
            settings["sampler"] = loader.sampler
    else:
        settings["batch_sampler"] = loader.batch_sampler
    other: Any = torch.utils.data.DataLoader(loader.dataset, **settings)
    while True:
        yield from other._get_iterator()  # no hook sees it


class Stream:
    """What a loop iterates over in place of its loader's iterator. Begins again when the loader ends."""

    def __init__(self, session: Session, loader: Any, make_iterator: Callable[[], Iterator[Any]]) -> None:
        self._session, self.loader, self._make_iterator = session, loader, make_iterator
        self._iterator, self._epochs = make_iterator(), 0

    def __iter__(self) -> Stream:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)

    def __next__(self) -> Any:
        session = self._session
        session.last_loader = self.loader
        is_trained_on = session.loader is self.loader
        with session.clock.phase(phases.DATA):
            if is_trained_on and session.source is not None:
                batch = next(session.source)
            else:
                batch = self._next(again=is_trained_on)
        if is_trained_on:
            session.got(batch)
        return batch

    def _next(self, *, again: bool) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            if not again:
                raise
        self._epochs += 1
        with contextlib.suppress(AttributeError):
            self.loader.batch_sampler.sampler.set_epoch(self._epochs)
        self._iterator = self._make_iterator()
        return next(self._iterator)
