#!/usr/bin/env python
"""Look at prepared data: show, stats, verify, merge, count, blend."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pretrainkit.cli import Parser, run_command


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    def add(name: str, what: str) -> Parser:
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    show = add("show", "decode documents, special tokens visible")
    show.add_argument("prefix", help="PREFIX of PREFIX.bin and PREFIX.idx")
    show.add_argument("--documents", default="0:3", help="N, or N:M without M; counted from 0")
    show.add_argument("--tokenizer-model", help="instead of the manifest's")
    show.add_argument("--ids", action="store_true", help="print the ids too")
    stats = add("stats", "lengths of documents, tokens by input file")
    stats.add_argument("data", nargs="+", help="prefixes or folders")
    stats.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the tokens by length of document")
    verify = add("verify", "structure, pointers, ids in range, checksums, EOD, manifest")
    verify.add_argument("data", nargs="+", help="prefixes or folders")
    verify.add_argument("--tokenizer-model", help="bounds the ids of data without a manifest")
    merge = add("merge", "join pairs in the order given into one")
    merge.add_argument("--input", nargs="+", required=True, help="prefixes, folders or globs")
    merge.add_argument("--output-prefix", required=True, help="writes OUTPUT_PREFIX.bin and .idx")
    merge.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    count = add("count", "documents, tokens, samples and steps of one epoch")
    count.add_argument("data", nargs="+", help="prefixes or folders")
    count.add_argument("--sequence-length", type=int, default=8192, help="tokens of a sample")
    count.add_argument("-g", "--global-batch-size", type=int, default=2048, help="samples of a step")
    count.add_argument("--split", default="100,0,0", help="shares of training, validation, test")
    blend = add("blend", "write a mixture's names, weights and token counts")
    blend.add_argument("data", nargs="+", help="PREFIX, NAME=PREFIX or NAME=PREFIX:WEIGHT")
    blend.add_argument("--output", type=Path, required=True, help="the blend file to write")
    blend.add_argument("--temperature", type=float, default=1.0, help="without weights: above 1 lifts small datasets")
    blend.add_argument("--total-tokens", type=float, help="tokens of the run, to tell the epochs of each part")
    blend.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run one of the commands."""
    command = {
        "show": run_show,
        "stats": run_stats,
        "verify": run_verify,
        "merge": run_merge,
        "count": run_count,
        "blend": run_blend,
    }[arguments.command]
    return command(arguments)


def run_show(arguments: argparse.Namespace) -> int:
    """Print documents."""
    from pretrainkit.data.indexed.inspect import show

    for document in show(Path(arguments.prefix), arguments.documents, arguments.tokenizer_model):
        if arguments.json:
            print(json.dumps(vars(document), ensure_ascii=False))
            continue
        print(f"--- document {document.number}, {len(document.ids)} tokens")
        if arguments.ids:
            print(*document.ids)
        print(document.text)
    return 0


def run_stats(arguments: argparse.Namespace) -> int:
    """Print and draw lengths."""
    from pretrainkit.data.indexed.inspect import format_statistics, plot, read_statistics

    statistics = [read_statistics(prefix) for prefix in _prefixes(arguments.data)]
    if arguments.plot:
        plot(statistics, arguments.plot)
    if arguments.json:
        _print_json([vars(one) for one in statistics])
    else:
        print("\n".join(format_statistics(one) for one in statistics))
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify; exit code 1 when anything is wrong."""
    from pretrainkit.data.indexed.verify import verify
    from pretrainkit.data.tokens.tokenizer import load_tokenizer

    num_ids = load_tokenizer(arguments.tokenizer_model).num_ids if arguments.tokenizer_model else None
    found = [verify(prefix, num_ids) for prefix in _prefixes(arguments.data)]
    if arguments.json:
        _print_json([vars(one) for one in found])
    else:
        for one in found:
            state = "BAD" if one.problems else "good"
            print(f"{one.prefix}: {state}, {one.num_documents} documents, {one.num_tokens} tokens")
            for line in (*one.problems, *one.notes):
                print(f"  {line}")
    return int(any(one.problems for one in found))


def run_merge(arguments: argparse.Namespace) -> int:
    """Join pairs."""
    import glob

    from pretrainkit.data.indexed.merge import merge
    from pretrainkit.data.indexed.pairs import read_counts
    from pretrainkit.data.readers.inputs import natural_key

    names: list[str] = []
    for name in arguments.input:
        for match in sorted(glob.glob(name), key=natural_key) if glob.has_magic(name) else [name]:  # noqa: PTH207
            prefix = match.removesuffix(".bin").removesuffix(".idx")
            # A shell's glob names all files of a pair.
            if not match.endswith(".manifest.json") and (prefix == match or prefix not in names):
                names.append(prefix)
    merge(_prefixes(names), arguments.output_prefix, overwrite=arguments.overwrite)
    counts = read_counts(arguments.output_prefix)
    if arguments.json:
        _print_json(vars(counts))
    else:
        print(f"{counts.prefix}: {counts.num_documents} documents, {counts.num_tokens} tokens, {counts.dtype}")
    return 0


def run_count(arguments: argparse.Namespace) -> int:
    """Print what an epoch is."""
    from pretrainkit.data.indexed.inspect import count_epoch

    prefixes = _prefixes(arguments.data)
    epochs = count_epoch(prefixes, arguments.split, arguments.sequence_length, arguments.global_batch_size)
    if arguments.json:
        _print_json([vars(epoch) for epoch in epochs])
        return 0
    for epoch in epochs:
        print(
            f"{epoch.split}: {epoch.num_documents} documents, {epoch.num_tokens} tokens = {epoch.num_samples} samples"
            f" of {arguments.sequence_length} = {epoch.num_steps} steps of {arguments.global_batch_size}"
        )
    return 0


def run_blend(arguments: argparse.Namespace) -> int:
    """Write a blend file."""
    from pretrainkit.data.indexed.blend import dataset_path, make_blend, write_blend
    from pretrainkit.errors import RequestError

    if arguments.output.exists() and not arguments.overwrite:
        raise RequestError(f"{arguments.output} exists", action="give another name, or --overwrite")
    entries = make_blend(arguments.data, arguments.temperature)
    write_blend(arguments.output, entries)
    if arguments.json:
        _print_json([vars(entry) for entry in entries])
        return 0
    for entry in entries:
        line = f"{entry.weight:8.4f}  {entry.num_tokens:>15} tokens  {entry.name}  {entry.prefix}"
        if arguments.total_tokens:
            line += f"  {entry.epochs_of(arguments.total_tokens):.2f} epochs"
        print(line)
    print(f"--dataset_path {arguments.output}, or for Megatron itself {dataset_path(entries)!r}")
    return 0


def _prefixes(data: list[str]) -> list[Path]:
    from pretrainkit.data.indexed.pairs import find_pairs

    return [prefix for path in data for prefix in find_pairs(path)]


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def main(argv: list[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    return run_command(run, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
