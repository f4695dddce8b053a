"""How long the documents of prepared datasets are, and where their tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pretrainkit.data.indexed.format import IndexedDataset
from pretrainkit.data.indexed.manifest import read_manifest

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Statistics:
    """Of one dataset."""

    prefix: Path
    num_documents: int
    num_tokens: int
    quantiles: dict[str, int]
    """Tokens of the shortest document, of that at 10%, 50%, 90% and 99%, and of the longest."""
    histogram: list[tuple[int, int, int]]
    """Documents and their tokens by length: in [2^i, 2^(i + 1)), as (2^i, documents, tokens)."""
    sources: list[tuple[str, int]]
    """Input files and their tokens; empty without a manifest."""


def document_lengths(dataset: IndexedDataset) -> NDArray[np.int64]:
    """[D] tokens of each document."""
    ends = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])
    return np.diff(ends[dataset.document_indices])


def read_statistics(prefix: Path | str) -> Statistics:
    """Read a pair's index and manifest; the .bin is not read."""
    dataset = IndexedDataset(prefix)
    manifest = read_manifest(prefix)
    lengths = document_lengths(dataset)
    histogram = []
    if lengths.size:
        bins = np.frexp(np.maximum(lengths, 1))[1] - 1
        documents, tokens = np.bincount(bins), np.bincount(bins, weights=lengths)
        histogram = [(1 << i, int(documents[i]), int(tokens[i])) for i in range(len(documents)) if documents[i]]
    found = np.quantile(lengths, QUANTILES, method="lower") if lengths.size else np.zeros(len(QUANTILES))
    names = ["shortest", "10%", "median", "90%", "99%", "longest"]
    return Statistics(
        Path(prefix),
        dataset.num_documents,
        dataset.num_tokens,
        {name: int(value) for name, value in zip(names, found, strict=True)},
        histogram,
        [(entry.path, entry.num_tokens) for entry in manifest.inputs] if manifest else [],
    )


def format_statistics(statistics: Statistics) -> str:
    """The same for a terminal."""
    lines = [
        f"{statistics.prefix}: {statistics.num_documents} documents, {statistics.num_tokens} tokens",
        "  tokens a document: " + ", ".join(f"{name} {value}" for name, value in statistics.quantiles.items()),
    ]
    most = max((tokens for _, _, tokens in statistics.histogram), default=1) or 1
    for least, documents, tokens in statistics.histogram:
        bar = "#" * round(40 * tokens / most)
        lines.append(f"  {least:>9} to {2 * least - 1:>9}: {documents:>10} documents {tokens:>13} tokens {bar}")
    for path, tokens in statistics.sources:
        lines.append(f"  {tokens:>13} tokens ({100 * tokens / max(statistics.num_tokens, 1):5.1f}%) from {path}")
    return "\n".join(lines)


def plot(statistics: list[Statistics], path: Path) -> None:
    """Draw the tokens by length of document to a .png (or .pdf, .svg)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for one in statistics:
        total = max(one.num_tokens, 1)
        lengths = [least for least, _, _ in one.histogram]
        axes.step(lengths, [tokens / total for _, _, tokens in one.histogram], where="post", label=one.prefix.name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("share of tokens")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
