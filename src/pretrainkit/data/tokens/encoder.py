"""Texts to token ids, by one of two libraries that must agree: fastokens, or Hugging Face tokenizers.

Both follow the same policy: no template tokens, no truncation, no padding; a special token's spelling in a
text is ordinary text (`plain`) or the token itself (`encode`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ENGINES = ("fastokens", "tokenizers")
SLICE_TEXTS = 32
"""Texts per call of `tokenizers`: its result objects are large."""

THREAD_END_S = 10.0
"""Time for the kernel to remove a thread that has ended; one that is there for longer is the library's own."""


class Encoder(Protocol):
    """What both engines do."""

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All ids [T] one text after the other, and offsets [len(texts) + 1] into them."""


class FastEncoder:
    """fastokens, with one thread: it once had a fault of exactness with several."""

    def __init__(self, json_path: str, *, special_tokens: bool) -> None:
        import fastokens

        self._tokenizer = fastokens.Tokenizer.from_file(json_path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._split_special = not special_tokens

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        ids, offsets = self._tokenizer.encode_batch_flat(texts, False, self._split_special)
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64)


class ReferenceEncoder:
    """Hugging Face tokenizers: what the ids are measured by."""

    def __init__(self, json_path: str, *, special_tokens: bool) -> None:
        import tokenizers

        self._tokenizer: Any = tokenizers.Tokenizer.from_file(json_path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not special_tokens

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        parts, lengths = [], []
        for begin in range(0, len(texts), SLICE_TEXTS):
            some = texts[begin : begin + SLICE_TEXTS]
            for encoding in self._tokenizer.encode_batch_fast(some, add_special_tokens=False):
                ids = np.array(encoding.ids, dtype=np.uint32)
                parts.append(ids)
                lengths.append(len(ids))
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32), offsets


@dataclass(frozen=True)
class EngineSpec:
    """Which library encodes, and with what."""

    name: str
    """`fastokens` or `tokenizers`."""
    json_path: str
    special_tokens: bool
    """Whether a special token's spelling in a text is that token."""
    verify_all: bool = False
    """Compare the ids of every text with those of tokenizers."""

    @property
    def reference(self) -> EngineSpec:
        """Hugging Face tokenizers for the same tokenizer."""
        return EngineSpec("tokenizers", self.json_path, self.special_tokens)


def load_encoder(spec: EngineSpec) -> Encoder:
    """Load a tokenizer, about a second for a large one. Raises whatever the library thinks of it."""
    kind = FastEncoder if spec.name == "fastokens" else ReferenceEncoder
    encoder = kind(spec.json_path, special_tokens=spec.special_tokens)
    trim_heap()  # reading a large tokenizer.json leaves 30 (tokenizers) to 70 MB (fastokens)
    _make_tables(encoder)
    return encoder


def trim_heap() -> None:
    """Give back the pages that are free but in between others."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _make_tables(encoder: Encoder) -> None:
    """Make fastokens' tables, 20 MB at its first call, which forked workers then share.

    In a thread that ends, and with it its cache of 16 MB, which each worker has for itself.
    """
    before = num_threads()
    thread = threading.Thread(target=encoder.encode, args=(["a"],))
    thread.start()
    thread.join()
    # join() returns before the kernel has removed the thread, on a busy machine long before; num_threads() must not
    # count it when we fork.
    end_s = time.monotonic() + THREAD_END_S
    while num_threads() > before and time.monotonic() < end_s:
        time.sleep(0.001)


def num_threads() -> int:
    """Threads of this process, those of libraries included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def one_thread() -> None:
    """Keep the libraries to one thread in this process; a worker has one core. Call before importing them."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["FASTOKENS_BPE_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def default_engine() -> str:
    """The library that encodes, unless its ids prove wrong: fastokens where it is installed."""
    return "fastokens" if importlib.util.find_spec("fastokens") is not None else "tokenizers"


def versions() -> dict[str, str]:
    """Installed versions of the libraries that give ids; ids differ between some of them."""
    found = {}
    for name in ENGINES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def finish(
    ids: NDArray[np.uint32],
    lengths: NDArray[np.int64],
    dtype: np.dtype,
    *,
    first: tuple[int, ...] = (),
    last: tuple[int, ...] = (),
) -> tuple[NDArray, NDArray[np.int32]]:
    """Put the ids `first` before and `last` after every document, in the dtype of the file.

    `lengths` [D] are all positive and sum to len(ids). Gives the ids and the new lengths.
    """
    extra = len(first) + len(last)
    if not extra:
        return ids.astype(dtype), lengths.astype(np.int32)
    new_lengths = lengths + extra
    ends = np.cumsum(new_lengths)
    out = np.empty(len(ids) + extra * len(lengths), dtype=dtype)
    is_text = np.ones(len(out), dtype=bool)
    for places, values in ((ends - new_lengths, first), (ends - len(last), last)):
        for position, value in enumerate(values):
            out[places + position] = value
            is_text[places + position] = False
    out[is_text] = ids
    return out, new_lengths.astype(np.int32)
