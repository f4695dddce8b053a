"""Which checkpoints may be averaged, and with which weights (see `average` for the arithmetic)."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from pretrainkit import hf_tokenizer
from pretrainkit.checkpoint.average import Average, Parent, ema_weights, normalised
from pretrainkit.checkpoint.convert import find_hf_folder
from pretrainkit.checkpoint.formats.hf_files import side_files
from pretrainkit.checkpoint.open import DetectedCheckpoint, detect
from pretrainkit.checkpoint.plan import MEGATRON_LM
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.files import hash_file
from pretrainkit.models.hf_config import read_fields
from pretrainkit.models.registry import family_named, read_config, read_shape

_STEP = re.compile(r"^(?:step_|iter_|checkpoint-)(\d+)$|step=(\d+)")
"""In the names of folders of this project, Megatron-LM, transformers' trainer and NeMo."""
_MAY_DIFFER = {"dtype", "_name_or_path", "transformers_version"}
"""Fields of config.json that say nothing of what the model computes."""
_TOKENIZER_FILES = {"vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "special_tokens_map.json"}


@dataclass(frozen=True)
class Rule:
    """How the weights of an average come about: equal ones, given ones, or those of a moving average."""

    weights: tuple[float, ...] | None = None
    """One for each checkpoint, in order."""
    ema_decay: float | None = None
    """What is kept of the moving average after `ema_interval` optimizer steps."""
    ema_interval: int = 1

    def shares(self, names: Sequence[str], steps: Sequence[int | None]) -> list[float]:
        """The weights of checkpoints, which add up to 1."""
        if self.ema_decay is None:
            return normalised(self.weights or [1.0] * len(names), len(names))
        if unknown := [name for name, step in zip(names, steps, strict=True) if step is None]:
            raise RequestError(
                f"the step of {', '.join(unknown)} is not known",
                where="--ema-decay",
                needed="folders whose names state the step: step_00001000, iter_0001000, checkpoint-1000",
                action="rename the folders, or give --weights",
            )
        known = [step for step in steps if step is not None]
        if any(later <= earlier for earlier, later in itertools.pairwise(known)):
            raise RequestError(
                f"steps {', '.join(map(str, known))}", where="--ema-decay", needed="ascending steps: oldest first"
            )
        return ema_weights(known, self.ema_decay, self.ema_interval)

    def __str__(self) -> str:
        """The rule, for people."""
        if self.ema_decay is not None:
            every = "step" if self.ema_interval == 1 else f"{self.ema_interval} steps"
            return f"exponential moving average, decay {self.ema_decay:g} per {every}"
        return "uniform" if self.weights is None else "given weights"


def step_in_name(folder: Path) -> int | None:
    """The optimizer step that the name of a checkpoint's folder states."""
    match = _STEP.search(folder.name)
    return int(match[1] or match[2]) if match else None


def name_of(found: DetectedCheckpoint) -> str:
    """The name of a checkpoint's folder; of Megatron-LM's that of the iteration."""
    is_iteration = found.format in MEGATRON_LM and found.weights.name != "release"
    return (found.weights if is_iteration else found.root).resolve().name


def average_of(
    paths: Sequence[Path],
    rule: Rule,
    *,
    hf_folder: Path | None = None,
    dtype: torch.dtype | None = None,
    ignore_config_fields: Iterable[str] = (),
) -> DetectedCheckpoint:
    """The average of checkpoints, to be converted like one of them; nothing but headers is read.

    Config and tokenizer are those of the last one. Raises RequestError when there are fewer than two, when one is given
    twice, and, by name, when they differ in shape, config.json or tokenizer.
    """
    if len(paths) < 2:
        raise RequestError(
            "one folder",
            where=", ".join(map(str, paths)),
            needed="two checkpoints or more",
            action="if it is the folder of a run, say which of its checkpoints: --last N or --steps STEP STEP",
        )
    found = [detect(path) for path in paths]
    if twice := [str(path) for path, count in Counter(each.weights.resolve() for each in found).items() if count > 1]:
        raise RequestError(f"given twice: {', '.join(twice)}", needed="each checkpoint once", action="use --weights")
    names = [name_of(each) for each in found]
    steps = [step_in_name(Path(name)) for name in names]
    shares = rule.shares(names, steps)
    check_alike(found, hf_folder, tuple(ignore_config_fields))
    parents = tuple(Parent(*values) for values in zip(found, names, steps, shares, strict=True))
    return replace(found[-1], average=Average(parents, str(rule), dtype))


def check_alike(found: Sequence[DetectedCheckpoint], hf_folder: Path | None, ignored: tuple[str, ...]) -> None:
    """Raise RequestError that names every checkpoint that differs from the last one, and in what."""
    folders = [find_hf_folder(each, hf_folder) for each in found]
    shapes = [read_shape(folder, ignore_fields=ignored) for folder in folders]
    problems = []
    for each, folder, shape in zip(found[:-1], folders, shapes, strict=False):
        differences = list(_shape_differences(shape, shapes[-1])) or list(_config_differences(folder, folders[-1]))
        differences += _tokenizer_differences(folder, folders[-1])
        if differences:
            problems.append(
                RequestError(
                    f"differs from {found[-1].weights}: {'; '.join(differences)}",
                    where=str(each.weights),
                    needed="checkpoints of one model: equal config.json and tokenizer",
                    action="leave it out",
                )
            )
    RequestError.raise_all(problems)


def _shape_differences(ours: ModelShape, theirs: ModelShape) -> Iterator[str]:
    for name, value in asdict(theirs).items():
        if (found := getattr(ours, name)) != getattr(theirs, name):
            yield f"{name} {found!r} and not {value!r}"


def _config_differences(ours: Path, theirs: Path) -> Iterator[str]:
    """Fields of config.json that mean something else, in the spelling of either generation of transformers."""
    fields = []
    for folder in (ours, theirs):
        config = read_config(folder)
        family = family_named(read_shape(folder, ignore_fields=config).family)
        fields.append(read_fields(config, family, str(folder / "config.json")))
    first, second = fields
    for name in sorted((first.keys() | second.keys()) - _MAY_DIFFER):
        if first.get(name) != second.get(name):
            yield f"config.json: {name} {first.get(name)!r} and not {second.get(name)!r}"


def _tokenizer_differences(ours: Path, theirs: Path) -> Iterator[str]:
    if ours == theirs:
        return
    hashes = [
        {
            path.name: hash_file(path)
            for path in side_files(folder)
            if path.name != hf_tokenizer.CONFIG_NAME
            and (path.name.startswith("tokenizer") or path.name in _TOKENIZER_FILES)
        }
        for folder in (ours, theirs)
    ]
    different = sorted(
        name for name in hashes[0].keys() | hashes[1].keys() if hashes[0].get(name) != hashes[1].get(name)
    )
    if hf_tokenizer.in_both_spellings(ours) != hf_tokenizer.in_both_spellings(theirs):
        different.append(hf_tokenizer.CONFIG_NAME)
    if different:
        yield f"another tokenizer ({', '.join(different)})"
