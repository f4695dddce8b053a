"""What the requests of all data tools have in common: how texts become ids, and which records are good."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pretrainkit.data.decontamination import NUM_WORDS
from pretrainkit.data.decontamination.evaluations import Evaluations, find_evaluations
from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.tokens.encoder import EngineSpec
from pretrainkit.data.tokens.template import template_ids
from pretrainkit.data.tokens.tokenizer import TokenizerFile
from pretrainkit.errors import DataError, RequestError
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """The flags that `pretrainkit.data.flags` adds to every tool."""

    append_eod: bool = False
    eod_token: str | None = None
    add_bos: bool = False
    special_tokens: str = "none"
    """`template`: what the tokenizer's template adds; `none`."""
    special_tokens_in_text: str = "plain"
    """`plain`, `encode` or `error`."""
    text_documents: str = "line"
    """`line` or `file`."""
    on_error: str = "stop"
    """`stop`, `skip`, or `replace` (bad characters are replaced, other bad records skipped)."""
    max_document_bytes: int = 0
    max_rejected: float = 1.0
    """Share of the records."""
    decontaminate: tuple[str, ...] = ()
    """Files, folders or globs of evaluation sets."""
    decontaminate_action: str = "drop"
    """`drop` or `report`."""
    decontaminate_words: int = NUM_WORDS
    verify_tokens: str = "sample"
    """`sample`, `all` or `off`."""
    engine: str = "auto"
    """`auto` or `tokenizers`."""
    overwrite: bool = False

    def rules(self, *keys: str, label_key: str = "") -> RecordRules:
        """Which records are good."""
        return RecordRules(keys, self.on_error == "replace", self.max_document_bytes, label_key)

    def engine_spec(self, name: str, json_path: Path) -> EngineSpec:
        """A library that encodes as this request asks for."""
        return EngineSpec(
            name, str(json_path), self.special_tokens_in_text != "plain", verify_all=self.verify_tokens == "all"
        )

    def special_ids(self, tokenizer: TokenizerFile) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before and after every document; what the template adds already is not added twice.

        Raises RequestError when the tokenizer has no such token.
        """
        first: tuple[int, ...] = ()
        last: tuple[int, ...] = ()
        if self.special_tokens == "template":
            for note in tokenizer.template_notes:
                LOGGER.warning("%s: %s", tokenizer.name, note)
            try:
                first, last = template_ids(tokenizer.post_processor)
            except (ValueError, KeyError) as error:
                raise RequestError(
                    f"a post-processor of an unknown kind: {error}",
                    where=tokenizer.name,
                    action="give --special-tokens none, and --append-eod if documents need an end",
                ) from error
        if self.add_bos and (bos_id := tokenizer.need_bos("--add-bos")) not in first:
            first = (bos_id, *first)
        if self.append_eod and (eod_id := tokenizer.need_eod("--append-eod")) not in last:
            last = (*last, eod_id)
        return first, last

    def check_rejected(
        self, where: str, *, num_records: int, num_written: int, num_rejected: int, first: str, place: str
    ) -> None:
        """Raises DataError when every record that was not empty, or more than the allowed share, was rejected.

        `first` says what is wrong with the first of them, and `place` where all of them can be read.
        """
        if not num_rejected or (num_written and num_rejected <= self.max_rejected * num_records):
            return
        limit = f"at most {self.max_rejected:.4g} of them (--max-rejected)" if num_written else "a record that is good"
        raise DataError(
            f"{num_rejected} of {num_records} records are bad; the first: {first}",
            where=where,
            needed=limit,
            action=f"fix them, or the flags ({place}); nothing of this output was committed",
        )

    def evaluations(self) -> Evaluations | None:
        """The evaluation sets that documents must not overlap with. Raises RequestError."""
        return find_evaluations(self.decontaminate, self.decontaminate_words, self.decontaminate_action)

    def text_options(self) -> dict[str, Any]:
        """These flags by name."""
        return {field.name: getattr(self, field.name) for field in fields(TextRequest)}


def warn_without_eod(last_ids: tuple[int, ...]) -> None:
    """Warn of documents that end with no token."""
    if not last_ids:
        LOGGER.warning(
            "documents end without an EOD token: a model that is trained on them doesn't learn where a text ends; "
            "--append-eod adds it"
        )
