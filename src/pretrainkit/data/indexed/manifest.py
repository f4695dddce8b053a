"""The record next to a prepared dataset, `<prefix>.manifest.json`: what it was made from and how.

It is written last, so it is also the mark that the pair is complete. Data made by Megatron itself has none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pretrainkit.data.indexed.labels import LabelRecord
from pretrainkit.data.tokens import encoder
from pretrainkit.errors import DataError
from pretrainkit.records import decode
from pretrainkit.units import format_count, format_duration

if TYPE_CHECKING:
    from pretrainkit.data.tokens.tokenizer import TokenizerFile

SHOWN_LABELS = 8
"""Labels in a summary."""


@dataclass(frozen=True)
class DataRecord:
    """The record of prepared data, a JSON file that begins with its format."""

    FORMAT: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {"format": self.FORMAT, **asdict(self)}

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The record in a file; None when there is no such file. Raises DataError."""
        try:
            return cls.decode(path.read_bytes(), str(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    @classmethod
    def decode(cls, content: bytes, where: str) -> Self:
        """The record from JSON; fields that this version doesn't know are ignored. Raises DataError when it is none."""
        try:
            value = json.loads(content)
            found = value.pop("format", None)
            if found != cls.FORMAT:
                writer = (
                    f", written by pretrainkit {value['pretrainkit_version']}" if "pretrainkit_version" in value else ""
                )
                this = f"this is pretrainkit {version('pretrainkit')}, which reads {cls.FORMAT!r}"
                raise ValueError(f"its format is {found!r}{writer}; {this}")
            return decode(cls, value, known_only=False, all_fields=False)
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"not a readable record: {error}",
                where=where,
                action="use the version of pretrainkit that wrote it, or make the data again",
            ) from error


def made_now(elapsed_s: float) -> dict[str, Any]:
    """How long it took, when and by which version, for a record."""
    return {
        "elapsed_s": round(elapsed_s, 3),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "pretrainkit_version": version("pretrainkit"),
    }


@dataclass(frozen=True)
class InputFile:
    """One input file as it was read."""

    path: str
    num_bytes: int
    """Size on disk, compressed if it is."""
    xxh3_128: str
    """XXH3-128 over the XXH3-128 digests of its pieces of 4 MiB, in hex; empty if it was not taken."""
    num_records: int
    num_tokens: int
    num_text_bytes: int = 0
    """Of its texts that became documents, in UTF-8; 0 in manifests of older versions."""


@dataclass(frozen=True)
class TokenizerRecord:
    """Which tokenizer gave the ids."""

    name: str
    """Folder, file or hub id as given."""
    sha256: str
    """Of the tokenizer.json that was used."""
    largest_id: int
    """Largest id it can give, added tokens included."""
    eod_id: int | None
    bos_id: int | None
    engine: str
    """`fastokens` or `tokenizers`: which library encoded."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries that give ids."""
    verified: str = ""
    """How fastokens' ids were compared with those of tokenizers: `sample`, `all` or `off`."""


def tokenizer_record(tokenizer: TokenizerFile, engine: str, verify_tokens: str) -> TokenizerRecord:
    """The record of a tokenizer whose ids the library `engine` gave, compared as `verify_tokens` says."""
    return TokenizerRecord(
        name=tokenizer.name,
        sha256=tokenizer.sha256,
        largest_id=tokenizer.largest_id,
        eod_id=tokenizer.eod_id,
        bos_id=tokenizer.bos_id,
        engine=engine,
        versions=encoder.versions(),
        verified=verify_tokens if engine == "fastokens" else "",
    )


@dataclass(frozen=True)
class SetPart:
    """Which part of a set a pair is: what the tasks of an array make, or the files of a run with --per-file."""

    index: int
    count: int
    set_id: str
    """Of the input and of the flags that decide the ids: equal in all parts."""
    path: str = ""
    """With --per-file, where the pair is below the run's output folder, without `_KEY_document`."""


@dataclass(frozen=True)
class Manifest(DataRecord):
    """All of a dataset's record. in = out + empty + rejected + contaminated holds for every one."""

    FORMAT = "pretrainkit-data-1"
    key: str
    """JSON key, or column, whose text was encoded."""
    dtype: str
    num_documents: int
    """Documents written (out)."""
    num_tokens: int
    num_records: int
    """Records read (in); blank lines are none."""
    num_empty: int
    """Records without a token; not written."""
    num_rejected: int
    """Bad records, set aside in the rejects file."""
    num_blank_lines: int
    num_replaced: int
    """Records in which characters that are no text became U+FFFD."""
    num_input_bytes: int
    """Bytes read, after decompression."""
    bin_bytes: int
    bin_crc32: int
    append_eod: bool
    add_bos: bool
    special_tokens_in_text: str
    """`plain`: encoded as ordinary text; `encode`: given their ids; `error`: such a record is bad."""
    tokenizer: TokenizerRecord
    inputs: tuple[InputFile, ...]
    idx_xxh3_128: str = ""
    """Of the .idx, in hex; empty in manifests of older versions."""
    num_files_left_out: int = 0
    """Files and `_*` folders in input folders that were not read, as they have no known suffix."""
    part: SetPart | None = None
    """None: the pair is all of what it was made from."""
    num_text_bytes: int = 0
    """Bytes in UTF-8 of the texts that became documents; 0 in manifests of older versions."""
    num_spelled: int = 0
    """Records whose text spells a special token; what it became says `special_tokens_in_text`."""
    labels: LabelRecord | None = None
    """None: --label-key was not given."""
    num_contaminated: int = 0
    """Records left out, as they overlap with an evaluation set."""
    decontamination: dict[str, Any] = field(default_factory=dict)
    """`num_words`, `action`, a hash of the `sets`, `overlaps`: records that overlap with each set. Empty: not asked."""
    flags: dict[str, Any] = field(default_factory=dict)
    elapsed_s: float = 0.0
    megabytes_per_second: float = 0.0
    """Of input as read after decompression, 10^6 bytes."""
    tokens_per_second: float = 0.0
    finished_at: str = ""
    """UTC, ISO 8601."""
    pretrainkit_version: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        accounted = self.num_documents + self.num_empty + self.num_rejected + self.num_contaminated
        if self.num_records != accounted:
            raise ValueError(f"record counts do not add up: {self.num_records} != {accounted}")

    @property
    def summary(self) -> str:
        """One line: counts, tokens and rate."""
        source = f" of {self.inputs[0].path}" if len(self.inputs) == 1 else ""
        return (
            f"{self.key}{source}: {self.num_records} records in = {self.num_documents} documents out"
            f" + {self.num_empty} empty + {self.num_rejected} rejected{contaminated_note(self.num_contaminated)}"
            f" (and {self.num_blank_lines} blank lines); {format_count(self.num_tokens)} tokens"
            f" ({self.num_tokens}) as {self.dtype}; {format_duration(self.elapsed_s)},"
            f" {self.megabytes_per_second:.1f} MB/s, {self.tokenizer.engine}"
            + labels_note(self.labels)
            + spelled_note(self.num_spelled, self.special_tokens_in_text)
            + overlaps_note(self.decontamination, self.decontamination.get("overlaps", {}))
        )


def labels_note(labels: LabelRecord | None) -> str:
    """For a summary: how many tokens have the most frequent labels; empty without labels."""
    if labels is None:
        return ""
    tokens = sorted(((tokens, label) for label, (_, tokens) in labels.counts.items()), reverse=True)
    shown = [f"{label} {format_count(count)}" for count, label in tokens[:SHOWN_LABELS]]
    more = [f"{len(tokens) - SHOWN_LABELS} more"] if len(tokens) > SHOWN_LABELS else []
    return f"; tokens by {labels.key}: {', '.join(shown + more) or 'none'}"


def spelled_note(count: int, meaning: str) -> str:
    """For a summary: the texts that spell a special token; empty where there are none."""
    return f"; {count} texts spell a special token ({meaning})" if count else ""


def contaminated_note(count: int) -> str:
    """For a summary: the records that were left out for evaluation sets; empty where there are none."""
    return f" + {count} contaminated" if count else ""


def overlaps_note(decontamination: dict[str, Any], overlaps: dict[str, int]) -> str:
    """For a summary: the records that overlap with each evaluation set; empty where none were looked for."""
    if not decontamination:
        return ""
    found = [f"{name} {count}" for name, count in overlaps.items() if count]
    kept = ", kept" if found and decontamination["action"] == "report" else ""
    return f"; overlaps with evaluation sets: {', '.join(found) or 'none'}{kept}"


def manifest_path(prefix: Path | str) -> Path:
    """`<prefix>.manifest.json`."""
    return Path(f"{prefix}.manifest.json")


def read_manifest(prefix: Path | str) -> Manifest | None:
    """The record of a pair; None when there is none: data made by Megatron itself. Raises DataError."""
    return Manifest.read(manifest_path(prefix))
