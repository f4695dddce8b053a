"""The flags that the data tools share, each declared once: what text becomes tokens, and what happens to bad records.

preprocess_data.py spells them with dashes, as Megatron's tool does, the others with underscores; all tools accept both.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from pretrainkit.data.decontamination import NUM_WORDS


class DataFlags:
    """Adds shared flags to groups of a tool's parser."""

    def __init__(self, *, unit: str, separator: str = "_") -> None:
        """`unit` is what the tool calls a text in its output: document or sample."""
        self._unit, self._separator = unit, separator

    def _adder(self, group: Any) -> Callable[..., None]:
        def add(name: str, **settings: Any) -> None:
            group.add_argument(f"--{name.replace('-', self._separator)}", **settings)

        return add

    def add_input(self, group: Any, name: str, help: str) -> None:
        """What to read, and how .txt files are cut."""
        add = self._adder(group)
        add(name, nargs="+", required=True, help=help)
        add("text-documents", choices=["line", "file"], default="line", help=f"a {self._unit} of .txt input")

    def add_overwrite(self, group: Any, help: str) -> None:
        """Whether output that exists is replaced."""
        self._adder(group)("overwrite", action="store_true", help=help)

    def add_tokens(
        self,
        group: Any,
        *,
        spellings: Sequence[str] = ("plain", "encode", "error"),
        verification: Sequence[str] = ("sample", "all", "off"),
        appends_eod: bool = False,
        has_bos: bool = True,
        special_tokens: str = "none",
    ) -> None:
        """EOD and BOS, special tokens in texts, and the library that encodes."""
        add = self._adder(group)
        action: Any = argparse.BooleanOptionalAction if appends_eod else "store_true"
        end = f"end every {self._unit} with exactly one EOD token"
        add("append-eod", action=action, default=appends_eod, help=end)
        add("eod-token", help=f"the token that ends a {self._unit}, instead of the tokenizer's EOS")
        around = f"template: what the tokenizer puts around a text by itself begins and ends every {self._unit}"
        add("special-tokens", choices=["none", "template"], default=special_tokens, help=around)
        if has_bos:
            add("add-bos", action="store_true", help=f"begin every {self._unit} with the BOS token")
        meanings = {"plain": "ordinary text", "encode": "that token", "error": "a bad record"}
        listed = " or ".join(f"{meanings[choice]} ({choice})" for choice in spellings)
        spelled = f"a special token spelled in a text is {listed}"
        add("special-tokens-in-text", choices=spellings, default="plain", help=spelled)
        compared = "how much is compared with Hugging Face tokenizers"
        add("verify-tokens", choices=verification, default="sample", help=compared)
        add("engine", choices=["auto", "tokenizers"], default="auto", help="auto: fastokens if its ids are equal")

    def add_records(self, group: Any) -> None:
        """What happens to bad records."""
        add = self._adder(group)
        bad = "skip: set bad records aside in a .rejects.jsonl file; replace: fix bad characters, skip the rest"
        add("on-error", choices=["stop", "skip", "replace"], default="stop", help=bad)
        limit = "largest share of bad records, such as 1%%; a run that leaves no record fails in any case"
        add("max-rejected", type=share, default=1.0, metavar="SHARE", help=limit)
        add("max-doc-bytes", type=int, default=0, help="longer texts are bad records; 0: no limit")

    def add_decontamination(self, group: Any) -> None:
        """Evaluation sets that the output must not overlap with."""
        add = self._adder(group)
        sets = f"evaluation sets, .jsonl or .txt: a {self._unit} that overlaps with one is left out"
        add("decontaminate", nargs="+", default=[], metavar="EVALS", help=sets)
        add("decontaminate-action", choices=["drop", "report"], default="drop", help="report: it is kept, and named")
        words = "words in a row that are an overlap; in Japanese, Chinese and Korean twice as many characters"
        add("decontaminate-words", type=int, default=NUM_WORDS, help=words)

    def add_running(self, group: Any, *, has_workers: bool = True, printed: str) -> None:
        """Processes and what is printed."""
        add = self._adder(group)
        if has_workers:
            add("workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
        add("json", action="store_true", help=f"print the {printed} as JSON")
        add("quiet", action="store_true", help="only warnings and the result")


def share(text: str) -> float:
    """A share such as `1%` or `0.01`, from 0 to 1."""
    number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1, or 0% to 100%")
    return number


def request_fields(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that a tool's request, the dataclass `kind`, has as fields; lists become tuples."""
    given = vars(arguments) | {"max_document_bytes": arguments.max_doc_bytes}
    names = [field.name for field in dataclasses.fields(kind) if field.name in given]
    return {name: tuple(given[name]) if isinstance(given[name], list) else given[name] for name in names}
