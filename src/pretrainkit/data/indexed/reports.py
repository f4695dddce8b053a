"""The commands of tools/inspect_data.py: each gives what to print, as JSON or as lines for a terminal."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit.data.indexed import blend, inspect
from pretrainkit.data.indexed.merge import merge
from pretrainkit.data.indexed.pairs import find_pairs, read_counts
from pretrainkit.data.indexed.verify import verify
from pretrainkit.data.readers.inputs import natural_key
from pretrainkit.data.tokens.tokenizer import load_tokenizer
from pretrainkit.errors import RequestError


@dataclass(frozen=True)
class Report:
    """The result of a command."""

    value: Any
    """Records for --json, printed at once."""
    lines: Iterable[str]
    exit_code: int = 0

    def print(self, *, as_json: bool) -> int:
        """Print it; gives the exit code."""
        if as_json:
            print(json.dumps(self.value, indent=2, ensure_ascii=False, default=str))
        else:
            for line in self.lines:
                print(line)
        return self.exit_code


def show_documents(prefix: Path, documents: str, tokenizer_model: str | None, *, with_ids: bool, as_json: bool) -> int:
    """Print documents as text, one at a time; as JSON one a line."""
    for document in inspect.show(prefix, documents, tokenizer_model):
        if as_json:
            print(json.dumps(vars(document), ensure_ascii=False))
            continue
        print(f"--- document {document.number}, {len(document.ids)} tokens")
        if with_ids:
            print(*document.ids)
        print(document.text)
    return 0


def report_statistics(data: list[str], plot: Path | None) -> Report:
    """The lengths of documents, and a plot of them if a file for it is given."""
    statistics = [inspect.read_statistics(prefix) for prefix in _prefixes(data)]
    if plot:
        inspect.plot(statistics, plot)
    return Report([vars(one) for one in statistics], map(inspect.format_statistics, statistics))


def report_verification(data: list[str], tokenizer_model: str | None) -> Report:
    """What is wrong with datasets; exit code 1 if anything is."""
    num_ids = load_tokenizer(tokenizer_model).num_ids if tokenizer_model else None
    found = [verify(prefix, num_ids) for prefix in _prefixes(data)]

    def lines() -> Iterator[str]:
        for one in found:
            state = "BAD" if one.problems else "good"
            yield f"{one.prefix}: {state}, {one.num_documents} documents, {one.num_tokens} tokens"
            yield from (f"  {line}" for line in (*one.problems, *one.notes))

    return Report([vars(one) for one in found], lines(), int(any(one.problems for one in found)))


def report_merge(inputs: list[str], output_prefix: str, *, overwrite: bool) -> Report:
    """Join pairs, named by prefixes, folders or globs, into one."""
    names: list[str] = []
    for name in inputs:
        for match in sorted(glob.glob(name), key=natural_key) if glob.has_magic(name) else [name]:  # noqa: PTH207
            prefix = match.removesuffix(".bin").removesuffix(".idx")
            # A shell's glob names all files of a pair.
            if not match.endswith(".manifest.json") and (prefix == match or prefix not in names):
                names.append(prefix)
    merge(_prefixes(names), output_prefix, overwrite=overwrite)
    counts = read_counts(output_prefix)
    line = f"{counts.prefix}: {counts.num_documents} documents, {counts.num_tokens} tokens, {counts.dtype}"
    return Report(vars(counts), [line])


def report_epoch(data: list[str], split: str, sequence_length: int, global_batch_size: int) -> Report:
    """Documents, tokens, samples and steps of one epoch."""
    epochs = inspect.count_epoch(_prefixes(data), split, sequence_length, global_batch_size)
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


def _prefixes(data: list[str]) -> list[Path]:
    return [prefix for path in data for prefix in find_pairs(path)]
