"""Commands of tools/inspect_data.py for .bin/.idx pairs: documents, statistics, joins, epochs and blends.

Each gives what to print, as JSON or as lines for a terminal. All but showing and joining documents read
indexes and manifests only.
"""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrainkit.config.split import SPLIT_NAMES, num_samples, parse_split, split_bounds
from pretrainkit.data.indexed import blend
from pretrainkit.data.indexed.format import IndexedDataset, open_pair
from pretrainkit.data.indexed.labels import StoredLabels
from pretrainkit.data.indexed.manifest import read_manifest
from pretrainkit.data.indexed.merge import merge
from pretrainkit.data.indexed.pair_set import find_pairs
from pretrainkit.data.readers.inputs import natural_key
from pretrainkit.data.report import Report
from pretrainkit.data.tokens.tokenizer import load_tokenizer
from pretrainkit.errors import RequestError

QUANTILES = {"shortest": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}


def _all_pairs(data: list[str]) -> list[Path]:
    return [prefix for path in data for prefix in find_pairs(path)]


@dataclass(frozen=True)
class ShownDocument:
    """One document."""

    number: int
    ids: list[int]
    text: str
    label: str | None


def show(prefix: Path, documents: str, tokenizer_model: str | None = None) -> Iterator[ShownDocument]:
    """Decode documents `N` or `N:M` (without M, and as far as there are any) with the manifest's tokenizer or another.

    Raises RequestError for a range that is not there, or an unknown tokenizer.
    """
    dataset = IndexedDataset(prefix)
    begin, end = _range(documents, dataset.num_documents)
    manifest = read_manifest(prefix)
    if tokenizer_model is None:
        if manifest is None:
            raise RequestError("no manifest names the tokenizer", where=str(prefix), action="give --tokenizer-model")
        tokenizer_model = manifest.tokenizer.name
    file = load_tokenizer(tokenizer_model)
    if manifest is not None and file.sha256 != manifest.tokenizer.sha256:
        raise RequestError(
            f"{tokenizer_model} is not the tokenizer that made this data",
            where=str(prefix),
            needed=f"{manifest.tokenizer.name} with SHA-256 {manifest.tokenizer.sha256[:12]}...",
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file.json_path))
    labels = StoredLabels(prefix, manifest.labels) if manifest and manifest.labels else None
    for number in range(begin, end):
        ids = dataset.document(number).tolist()
        label = labels.label_of(number) if labels else None
        yield ShownDocument(number, ids, tokenizer.decode(ids, skip_special_tokens=False), label)


def _range(text: str, count: int) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        begin = int(first or 0)
        end = min(int(last) if last else count, count) if colon else begin + 1
    except ValueError:
        raise RequestError(repr(text), where="--documents", needed="N or N:M") from None
    if not 0 <= begin < end <= count:
        raise RequestError(f"{text}; there are {count} documents", where="--documents", needed=f"0 to {count - 1}")
    return begin, end


def show_documents(prefix: Path, documents: str, tokenizer_model: str | None, *, with_ids: bool, as_json: bool) -> int:
    """Print documents as text, one at a time; as JSON one a line."""
    for document in show(prefix, documents, tokenizer_model):
        if as_json:
            print(json.dumps(vars(document), ensure_ascii=False))
            continue
        label = f", {document.label}" if document.label else ""
        print(f"--- document {document.number}, {len(document.ids)} tokens{label}")
        if with_ids:
            print(*document.ids)
        print(document.text)
    return 0


@dataclass(frozen=True)
class Statistics:
    """The statistics of one dataset."""

    prefix: Path
    num_documents: int
    num_tokens: int
    quantiles: dict[str, int]
    """Tokens of the shortest document, of that at 10%, 50%, 90% and 99%, and of the longest."""
    histogram: list[tuple[int, int, int]]
    """Documents and their tokens by length: in [2^i, 2^(i + 1)), as (2^i, documents, tokens)."""
    sources: list[tuple[str, int]]
    """Input files and their tokens; empty without a manifest."""
    labels: dict[str, int]
    """Tokens of each label; empty without --label-key."""


def read_statistics(prefix: Path | str) -> Statistics:
    """Read a pair's index and manifest; the .bin is not read."""
    dataset = IndexedDataset(prefix)
    manifest = read_manifest(prefix)
    ends = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])
    lengths = np.diff(ends[dataset.document_indices])  # [D]
    histogram = []
    if lengths.size:
        bins = np.frexp(np.maximum(lengths, 1))[1] - 1
        documents, tokens = np.bincount(bins), np.bincount(bins, weights=lengths)
        histogram = [(1 << i, int(documents[i]), int(tokens[i])) for i in range(len(documents)) if documents[i]]
    found = np.quantile(lengths, [*QUANTILES.values()], method="lower") if lengths.size else np.zeros(len(QUANTILES))
    return Statistics(
        Path(prefix),
        dataset.num_documents,
        dataset.num_tokens,
        {name: int(value) for name, value in zip(QUANTILES, found, strict=True)},
        histogram,
        [(entry.path, entry.num_tokens) for entry in manifest.inputs] if manifest else [],
        {name: tokens for name, (_, tokens) in manifest.labels.counts.items()} if manifest and manifest.labels else {},
    )


def format_statistics(statistics: Statistics) -> str:
    """The statistics as text for a terminal."""
    lines = [
        f"{statistics.prefix}: {statistics.num_documents} documents, {statistics.num_tokens} tokens",
        "  tokens a document: " + ", ".join(f"{name} {value}" for name, value in statistics.quantiles.items()),
    ]
    most = max((tokens for _, _, tokens in statistics.histogram), default=1) or 1
    for least, documents, tokens in statistics.histogram:
        bar = "#" * round(40 * tokens / most)
        lines.append(f"  {least:>9} to {2 * least - 1:>9}: {documents:>10} documents {tokens:>13} tokens {bar}")
    shares = [(f"from {path}", tokens) for path, tokens in statistics.sources]
    shares += [(f"labelled {name}", tokens) for name, tokens in statistics.labels.items()]
    for what, tokens in shares:
        lines.append(f"  {tokens:>13} tokens ({100 * tokens / max(statistics.num_tokens, 1):5.1f}%) {what}")
    return "\n".join(lines)


def report_statistics(data: list[str], plot_path: Path | None) -> Report:
    """The lengths of documents, and a plot of them if a file for it is given."""
    statistics = [read_statistics(prefix) for prefix in _all_pairs(data)]
    if plot_path:
        plot(statistics, plot_path)
    return Report([vars(one) for one in statistics], map(format_statistics, statistics))


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


def report_merge(inputs: list[str], output_prefix: str, *, overwrite: bool) -> Report:
    """Join pairs, named by prefixes, folders or globs, into one."""
    names: list[str] = []
    for name in inputs:
        for match in sorted(glob.glob(name), key=natural_key) if glob.has_magic(name) else [name]:  # noqa: PTH207
            prefix = match.removesuffix(".bin").removesuffix(".idx").removesuffix(".labels")
            # A shell's glob names all files of a pair.
            if not match.endswith(".manifest.json") and (prefix == match or prefix not in names):
                names.append(prefix)
    merge(_all_pairs(names), output_prefix, overwrite=overwrite)
    pair = open_pair(output_prefix)
    counts = "prefix", "num_tokens", "num_sequences", "num_documents", "dtype"
    line = f"{pair.prefix}: {pair.num_documents} documents, {pair.num_tokens} tokens, {pair.dtype}"
    return Report({name: getattr(pair, name) for name in counts}, [line])


@dataclass(frozen=True)
class Epoch:
    """One split of one or several datasets; samples don't cross from one dataset to the next."""

    split: str
    num_documents: int
    num_tokens: int
    num_samples: int
    num_steps: int
    """Whole batches."""


def count_epoch(prefixes: list[Path], split: str, sequence_length: int, global_batch_size: int) -> list[Epoch]:
    """Documents, tokens, samples and steps of each split with a share.

    Raises RequestError when a split that is wanted gets less than one sample: training on it would not start.
    """
    shares = parse_split(split)
    counts = np.zeros((len(SPLIT_NAMES), 3), dtype=np.int64)
    for prefix in prefixes:
        lengths = IndexedDataset(prefix).sequence_lengths
        for i, (begin, end) in enumerate(itertools.pairwise(split_bounds(shares, len(lengths)))):
            tokens = int(lengths[begin:end].sum(dtype=np.int64))
            counts[i] += end - begin, tokens, num_samples(tokens, sequence_length)
    epochs = [
        Epoch(name, documents, tokens, samples, samples // global_batch_size)
        for name, share, (documents, tokens, samples) in zip(SPLIT_NAMES, shares, counts.tolist(), strict=True)
        if share
    ]
    for epoch in epochs:
        if not epoch.num_samples:
            raise RequestError(
                f"the {epoch.split} split of {split} has {epoch.num_tokens} tokens",
                where="--split",
                needed=f"at least {sequence_length + 1}: one sample of {sequence_length} and the token after it",
                action=f"give the {epoch.split} split a larger share, or none",
            )
    return epochs


def report_epoch(data: list[str], split: str, sequence_length: int, global_batch_size: int) -> Report:
    """Documents, tokens, samples and steps of one epoch."""
    epochs = count_epoch(_all_pairs(data), split, sequence_length, global_batch_size)
    lines = (
        f"{epoch.split}: {epoch.num_documents} documents, {epoch.num_tokens} tokens = {epoch.num_samples} samples"
        f" of {sequence_length} = {epoch.num_steps} steps of {global_batch_size}"
        for epoch in epochs
    )
    return Report([vars(epoch) for epoch in epochs], lines)


def report_blend(
    data: list[str], output: Path, *, temperature: float, total_tokens: float | None, overwrite: bool
) -> Report:
    """Write a blend file; its datasets, and how to train from it."""
    if output.exists() and not overwrite:
        raise RequestError(f"{output} exists", action="give another name, or --overwrite")
    entries = blend.make_blend(data, temperature)
    blend.write_blend(output, entries)

    def lines() -> Iterator[str]:
        for entry in entries:
            epochs = f"  {entry.epochs_of(total_tokens):.2f} epochs" if total_tokens else ""
            yield f"{entry.weight:8.4f}  {entry.num_tokens:>15} tokens  {entry.name}  {entry.prefix}{epochs}"
        yield f"--dataset_path {output}, or for Megatron itself {blend.dataset_path(entries)!r}"

    return Report([vars(entry) for entry in entries], lines())
