"""The batches a training loop gets: its loader's own, the same ones again, or those of a loader set otherwise."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch.utils.data

from pretrainkit.diagnosis.observe import batches, phases

if TYPE_CHECKING:
    from pretrainkit.diagnosis.observe.session import Session


def replay(seen: list[Any]) -> Iterator[Any]:
    """Batches that were seen before, again and again, in containers of their own: data without the cost of reading."""
    return map(batches.copied, itertools.cycle(seen))


class OtherLoader:
    """The loop's dataset, sampler and collation under a DataLoader with other settings; begins again at its end."""

    def __init__(self, loader: Any, **changed: Any) -> None:
        self._loader = clone(loader, **changed)
        self._iterator: Iterator[Any] = iter(())
        self.depth = depth_of(self._loader)
        """Batches that its workers fetch ahead."""

    def __iter__(self) -> OtherLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = self._loader._get_iterator()  # no hook sees it
            return next(self._iterator)

    def close(self) -> None:
        """End its workers."""
        shutdown = getattr(self._iterator, "_shutdown_workers", None)
        if shutdown:
            shutdown()


def depth_of(loader: Any) -> int:
    """Batches that a loader's workers fetch ahead."""
    return int(loader.num_workers * (loader.prefetch_factor or 2)) if loader.num_workers else 0


def clone(loader: Any, **changed: Any) -> Any:
    """A plain DataLoader as `loader`, some settings changed."""
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "prefetch_factor": loader.prefetch_factor,
        "generator": loader.generator,
    }
    settings |= changed
    if not settings["num_workers"]:
        settings["prefetch_factor"] = None
    elif loader.multiprocessing_context is not None:
        settings["multiprocessing_context"] = loader.multiprocessing_context
    if isinstance(loader.dataset, torch.utils.data.IterableDataset) or loader.batch_sampler is None:
        settings |= {"batch_size": loader.batch_size}
        if loader.batch_size is not None:
            settings["drop_last"] = loader.drop_last
        if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
            settings["sampler"] = loader.sampler
    else:
        settings["batch_sampler"] = loader.batch_sampler
    return torch.utils.data.DataLoader(loader.dataset, **settings)


class Stream:
    """What a loop iterates over in place of its loader's iterator. Begins again when the loader ends."""

    def __init__(self, session: Session, loader: Any, make_iterator: Callable[[], Iterator[Any]]) -> None:
        self._session, self.loader, self._make_iterator = session, loader, make_iterator
        self._iterator = make_iterator()

    def __iter__(self) -> Stream:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)

    def __next__(self) -> Any:
        session = self._session
        session.last_loader = self.loader
        is_trained_on = session.loop.loader is self.loader
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
        self._session.epochs_begun += 1
        with contextlib.suppress(AttributeError):
            self.loader.batch_sampler.sampler.set_epoch(self._session.epochs_begun)
        self._iterator = self._make_iterator()
        return next(self._iterator)
