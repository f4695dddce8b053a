"""What the requests of all data tools have in common: how texts become ids, and which records are good."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.tokens.encoder import EngineSpec


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """The flags that `pretrainkit.data.flags` adds to every tool."""

    append_eod: bool = False
    eod_token: str | None = None
    special_tokens_in_text: str = "plain"
    """`plain`, `encode` or `error`."""
    text_documents: str = "line"
    """`line` or `file`."""
    on_error: str = "stop"
    """`stop`, `skip`, or `replace` (bad characters are replaced, other bad records skipped)."""
    max_document_bytes: int = 0
    verify_tokens: str = "sample"
    """`sample`, `all` or `off`."""
    engine: str = "auto"
    """`auto` or `tokenizers`."""
    overwrite: bool = False

    def rules(self, *keys: str) -> RecordRules:
        """Which records are good."""
        return RecordRules(keys, self.on_error == "replace", self.max_document_bytes)

    def engine_spec(self, name: str, json_path: Path) -> EngineSpec:
        """A library that encodes as this request asks for."""
        return EngineSpec(
            name, str(json_path), self.special_tokens_in_text != "plain", verify_all=self.verify_tokens == "all"
        )

    def text_options(self) -> dict[str, Any]:
        """These flags by name."""
        return {field.name: getattr(self, field.name) for field in fields(TextRequest)}
