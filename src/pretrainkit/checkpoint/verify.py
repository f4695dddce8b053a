"""The release gate's checks of files: what was written, re-read from disk, against where it came from.

Released weights are read with the safetensors package and not with this project's own reader, so that a fault in
the reader can't hide one in the writer. Nothing here changes a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrainkit.checkpoint import hf
from pretrainkit.checkpoint.convert import find_hf_folder
from pretrainkit.checkpoint.detect import Found, Kind, detect
from pretrainkit.checkpoint.mapping import Entry, expand
from pretrainkit.checkpoint.targets import Source, open_source
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.files import read_json, sha256_file
from pretrainkit.models.registry import read_config, read_shape

_SECRET = re.compile(r"hf_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|ghp_[A-Za-z0-9]{36}|sk-[A-Za-z0-9]{40,}")
_TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".md", ".py")
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_LIMIT = 8  # names that a message lists


@dataclass(frozen=True)
class Check:
    """One question that the gate asks."""

    name: str
    passed: bool
    found: str
    """What was seen, for people."""


@dataclass
class Verdict:
    """All that the gate found."""

    source: str
    released: str
    checks: list[Check] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every file of the release."""
    skipped: list[str] = field(default_factory=list)
    """What was not checked, and why."""

    @property
    def passed(self) -> bool:
        """Whether every check passed, and there was one."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"passed": self.passed, **asdict(self)}


def verify_files(
    source: Path, released: Path, *, hf_folder: Path | None = None, ignore_config_fields: Iterable[str] = ()
) -> Verdict:
    """Compare a released Hugging Face folder with the checkpoint that it was made from.

    Raises RequestError when one of the two isn't a model folder at all; every other fault is a failed check.
    """
    found = detect(source)
    if detect(released).kind is not Kind.HF:
        raise RequestError("not a Hugging Face folder", where=str(released), needed="the folder to be released")
    origin = find_hf_folder(found, hf_folder)
    shape = read_shape(origin, ignore_fields=ignore_config_fields)
    verdict = Verdict(str(source), str(released))
    steps: dict[str, Callable[[], Iterator[Check]]] = {
        "config.json": lambda: _check_config(origin, released, shape),
        "weight files": lambda: _check_weight_files(released),
        "weights": lambda: _check_weights(found, released, shape),
        "side files": lambda: _check_side_files(origin, released),
        "tokenizer": lambda: _check_tokenizer(released, shape),
        "privacy": lambda: _check_privacy(released),
    }
    for name, step in steps.items():
        try:
            verdict.checks.extend(step())
        except Exception as error:  # whatever goes wrong is a doubt, and a doubt fails the gate
            verdict.checks.append(Check(name, False, f"{type(error).__name__}: {error}"))
    verdict.hashes = {
        str(path.relative_to(released)): sha256_file(path) for path in sorted(released.rglob("*")) if path.is_file()
    }
    return verdict


def _check_config(origin: Path, released: Path, shape: ModelShape) -> Iterator[Check]:
    ours, theirs = read_config(released), read_config(origin)
    ignored = {*_DTYPE_FIELDS, "_name_or_path", "transformers_version"}
    different = [
        f"{name}: {ours.get(name)!r} and not {theirs.get(name)!r}"
        for name in sorted((ours.keys() | theirs.keys()) - ignored)
        if ours.get(name) != theirs.get(name)
    ]
    yield _check("config.json says what the source's says", different, "equal but for the dtype")
    problems = []
    try:
        if read_shape(released, ignore_fields=ours) != shape:
            problems.append("it describes another shape")
    except RequestError as error:
        problems.append(str(error))
    yield _check("config.json can be read and describes the source's shape", problems, "it does")


def _check_weight_files(released: Path) -> Iterator[Check]:
    located = hf.locate_tensors(released)
    yield Check("the index lists what the files hold", True, f"{len(located)} tensors")
    used = {location.path for location in located.values()}
    stray = [path.name for path in sorted(released.iterdir()) if hf.is_weight_file(path) and path not in used]
    yield _check("no other weight files", stray, "none")
    sizes = sum(location.num_bytes for location in located.values())
    index = released / hf.INDEX_NAME
    if index.is_file():
        total = read_json(index).get("metadata", {}).get("total_size")
        yield Check("total_size of the index", total == sizes, f"{total} listed, {sizes} bytes of tensors")


def _check_weights(found: Found, released: Path, shape: ModelShape) -> Iterator[Check]:
    entries = expand(shape)
    reader = open_source(found, entries, shape)
    wanted = {name for entry in entries for name in entry.hf}
    with ExitStack() as stack:
        read, names = _open_released(released, stack)
        extra = names - wanted - ({"lm_head.weight"} if shape.tie_word_embeddings else set())
        missing = wanted - names
        yield _check("every tensor is there", sorted(missing), f"{len(wanted)} tensors")
        yield _check("no tensor that the architecture doesn't have", sorted(extra), "none")
        comparison = _Comparison(_declared_dtype(released))
        for entry in entries:
            comparison.add(entry, reader, read, missing)
        if shape.tie_word_embeddings and "lm_head.weight" in names:
            embedding = read("model.embed_tokens.weight")
            same = _same_bits(read("lm_head.weight"), embedding)
            yield Check("tied weights are equal", same, "lm_head.weight and model.embed_tokens.weight")
    yield from comparison.checks()


class _Comparison:
    """Collects what differs, tensor by tensor."""

    def __init__(self, declared: torch.dtype | None) -> None:
        self.declared = declared
        self.different: list[str] = []
        self.misshapen: list[str] = []
        self.not_finite: list[str] = []
        self.zero: list[str] = []
        self.dtypes: list[str] = []
        self.cast: set[str] = set()
        self.num_elements = 0

    def add(self, entry: Entry, reader: Source, read: Callable[[str], Tensor], missing: set[str]) -> None:
        """Compare the tensors of an entry."""
        for name, shape, rows in zip(entry.hf, entry.shapes, reader.read(entry), strict=True):
            if name in missing:
                continue
            tensor = read(name)
            if tuple(tensor.shape) != shape:
                self.misshapen.append(f"{name} {list(tensor.shape)} and not {list(shape)}")
                continue
            expected = rows.tensor()
            if expected.dtype != tensor.dtype:
                self.cast.add(f"{expected.dtype} to {tensor.dtype}".replace("torch.", ""))
                expected = expected.to(tensor.dtype)
                if entry.weight.keep_dtype:
                    self.dtypes.append(f"{name} must not be cast")
            if self.declared not in (None, tensor.dtype) and not entry.weight.keep_dtype:
                self.dtypes.append(f"{name} is {tensor.dtype}")
            if not _same_bits(tensor, expected):
                count = int((tensor != expected).sum())
                self.different.append(f"{name} ({count} of {tensor.numel()} elements)")
            if not torch.isfinite(tensor).all():
                self.not_finite.append(name)
            if not name.endswith("bias") and not tensor.any():
                self.zero.append(name)
            self.num_elements += tensor.numel()

    def checks(self) -> Iterator[Check]:
        """What came out."""
        cast = f", cast from {', '.join(sorted(self.cast))}" if self.cast else ""
        yield _check("shapes", self.misshapen, "right")
        yield _check(
            "bit-equal to the source after the inverse mapping", self.different, f"{self.num_elements} elements{cast}"
        )
        yield _check("finite", self.not_finite, "all elements")
        yield _check("no tensor of zeros", self.zero, "none")
        yield _check("dtype is what config.json says", self.dtypes, str(self.declared))


def _open_released(released: Path, stack: ExitStack) -> tuple[Callable[[str], Tensor], set[str]]:
    """A reader of released tensors by name, and their names, through the safetensors package."""
    from safetensors import safe_open

    files = {}
    for path in sorted(released.glob("*.safetensors")):
        handle = stack.enter_context(safe_open(path, framework="pt"))
        files.update(dict.fromkeys(handle.keys(), handle))
    return lambda name: files[name].get_tensor(name), set(files)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Equality of bits: 0 and -0 differ, a NaN equals itself."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))


def _declared_dtype(released: Path) -> torch.dtype | None:
    config = read_config(released)
    name = next((config[key] for key in _DTYPE_FIELDS if config.get(key)), None)
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _check_side_files(origin: Path, released: Path) -> Iterator[Check]:
    problems = []
    names = [path.name for path in hf.side_files(origin)]
    for name in names:
        copy = released / name
        if not copy.is_file():
            problems.append(f"{name} is missing")
        elif sha256_file(copy) != sha256_file(origin / name):
            problems.append(f"{name} differs from the source's")
    yield _check("tokenizer, template and generation files are the source's", problems, ", ".join(names) or "none")


def _check_tokenizer(released: Path, shape: ModelShape) -> Iterator[Check]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(released, local_files_only=True)
    largest = max(tokenizer.get_vocab().values(), default=0)
    yield Check(
        "token ids fit the embedding",
        largest < shape.vocab_size,
        f"largest id {largest}, {shape.vocab_size} rows",
    )
    config = read_config(released)
    generation_path = released / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    problems = []
    for name, source in (("config.json", config), ("generation_config.json", generation)):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            problems += [
                f"{key} {value} of {name} is no row"
                for value in _ids(source.get(key))
                if not -1 <= value < shape.vocab_size
            ]
    ends = {*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
    if tokenizer.eos_token_id is not None and ends and tokenizer.eos_token_id not in ends:
        problems.append(f"the tokenizer ends texts with {tokenizer.eos_token_id}, the configs with {sorted(ends)}")
    shared = {*_ids(config.get("eos_token_id"))} & {*_ids(generation.get("eos_token_id"))}
    if config.get("eos_token_id") is not None and generation.get("eos_token_id") is not None and not shared:
        problems.append(
            f"eos_token_id is {config['eos_token_id']} in config.json"
            f" and {generation['eos_token_id']} in generation_config.json"
        )
    yield _check("special token ids agree", problems, f"eos {sorted(ends)}, tokenizer {tokenizer.eos_token_id}")


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _check_privacy(released: Path) -> Iterator[Check]:
    problems = []
    for path in sorted(released.rglob("*")):
        if path.suffix not in _TEXT_SUFFIXES or not path.is_file() or path.name == "tokenizer.json":
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if _SECRET.search(text):
            problems.append(f"{path.name} holds what looks like an access token")
        if path.suffix == ".json":
            problems += [f"{path.name}: local path {value}" for value in _local_paths(json.loads(text))]
    yield _check("no access tokens and no local paths", problems, "none")


def _local_paths(value: Any) -> list[str]:
    """Values of `name_or_path` fields that are paths of a machine."""
    if not isinstance(value, dict):
        return []
    fields = (value.get("_name_or_path"), value.get("name_or_path"))
    return [field for field in fields if isinstance(field, str) and field.startswith(("/", "~", "./"))]


def _check(name: str, problems: Sequence[str], fine: str) -> Check:
    """A check that passes when there is no problem."""
    if not problems:
        return Check(name, True, fine)
    more = f" and {len(problems) - _LIMIT} more" if len(problems) > _LIMIT else ""
    return Check(name, False, "; ".join(problems[:_LIMIT]) + more)
