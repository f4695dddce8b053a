"""The release gate's checks of files: the release, re-read from disk, is compared with its source.

Nothing here changes a file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pretrainkit.checkpoint.formats import hf, hf_files
from pretrainkit.checkpoint.formats.hf_files import GENERATION_CONFIG, INDEX_NAME, ORIGIN_NAME
from pretrainkit.checkpoint.open import detect
from pretrainkit.checkpoint.plan import CheckpointFormat
from pretrainkit.config.schema import ModelShape
from pretrainkit.data.tokens.tokenizer import TokenizerFile, load_tokenizer
from pretrainkit.errors import RequestError
from pretrainkit.files import hash_file, read_json
from pretrainkit.hf_tokenizer import CONFIG_NAME as TOKENIZER_CONFIG
from pretrainkit.hf_tokenizer import in_both_spellings
from pretrainkit.models.hf_config import read_fields
from pretrainkit.models.multimodal import is_multimodal
from pretrainkit.models.registry import family_named, find_family, read_config, read_shape, read_whole_config
from pretrainkit.release import prompts
from pretrainkit.release.held_out import held_out_of, run_of
from pretrainkit.release.privacy import check_privacy
from pretrainkit.release.report import Check, ReleaseReport, collect
from pretrainkit.release.source import check_origin, find_source
from pretrainkit.release.weights import DTYPE_FIELDS, check_weights

MODEL_CARD = "README.md"
"""Not compared: a release has a model card of its own author."""
_OF_ITS_OWN = {"config.json", INDEX_NAME, ORIGIN_NAME, MODEL_CARD, ".gitattributes"}
"""Files that a release may have although its source has none, besides weights and licences."""
_NOT_COMPARED = {*DTYPE_FIELDS, "_name_or_path", "transformers_version", "rope_parameters"}
"""Fields of config.json that a release may have otherwise; rope_parameters are compared by what they mean."""


def verify_files(
    source: Path | Sequence[Path],
    released: Path,
    *,
    hf_folder: Path | None = None,
    ignore_config_fields: Iterable[str] = (),
) -> ReleaseReport:
    """Compare a released Hugging Face folder with the checkpoint that it was made from, or of an average its parents.

    Raises RequestError when one of the two isn't a model folder at all; every other fault is a failed check.
    """
    if detect(released).format is not CheckpointFormat.HF:
        raise RequestError("not a Hugging Face folder", where=str(released), needed="the folder to be released")
    compared = find_source(source, released, hf_folder=hf_folder, ignore_config_fields=ignore_config_fields)
    origin, shape = compared.hf_folder, compared.shape
    given = [source] if isinstance(source, Path) else source
    report = ReleaseReport(", ".join(map(str, given)), str(released), [str(path.absolute()) for path in given])
    steps = {  # generators, so that each fails alone
        "config.json": _check_config(origin, released, shape),
        "rotary settings": _check_rope(given[0], released),
        "weight files": _check_weight_files(released),
        "origin": check_origin(compared, released),
        "weights": check_weights(compared, released),
        "side files": _check_side_files(origin, released),
        "other files": _check_other_files(origin, released),
        "tokenizer": _check_tokenizer(released, shape, report.notes),
        "privacy": check_privacy(released, report.notes),
    }
    for name, checks in steps.items():
        report.checks += collect(name, checks)
    report.notes += _notes(released)
    if len(given) == 1:  # the loss of an average is that of no step
        report.held_out = held_out_of(given[0])
    report.hashes = hash_files(released)
    return report


def hash_files(released: Path) -> dict[str, str]:
    """SHA-256 of every file of a release, by its path in it."""
    return {str(path.relative_to(released)): hash_file(path) for path in sorted(released.rglob("*")) if path.is_file()}


def _check_config(origin: Path, released: Path, shape: ModelShape) -> Iterator[Check]:
    ours, theirs = read_config(released), read_config(origin)
    family = family_named(shape.family)
    # Without model_type transformers can't open a folder, so a release has it where the source doesn't.
    stated = {"model_type": family.name, **theirs}
    stated.pop(hf_files.QUANTIZATION, None)  # of the source's weights; those of a release aren't quantized
    meant, found = (read_fields(config, family, "config.json") for config in (stated, ours))
    different = [
        f"{name}: {found.get(name)!r} and not {meant.get(name)!r}"
        for name in sorted((found.keys() | meant.keys()) - _NOT_COMPARED)
        if found.get(name) != meant.get(name)
    ]
    whole, source = read_whole_config(released), read_whole_config(origin)
    if is_multimodal(source):
        outside = {*_NOT_COMPARED, "text_config", "tie_word_embeddings", hf_files.QUANTIZATION}
        names = (whole.keys() | source.keys()) - outside
        different += [f"{name} of the whole model" for name in sorted(names) if whole.get(name) != source.get(name)]
    added = [f"{name} {json.dumps(ours[name])}" for name in sorted(ours.keys() - theirs.keys() - {*DTYPE_FIELDS})]
    fine = "equal but for the dtype" if not added else f"the same; added: {', '.join(added)}"
    yield Check.of("config.json says what the source's says", different, fine)
    problems = []
    try:
        if read_shape(released, ignore_fields=ours) != shape:
            problems.append("it describes another shape")
    except RequestError as error:
        problems.append(str(error))
    yield Check.of("config.json can be read and describes the source's shape", problems, "it does")


def _check_rope(source: Path, released: Path) -> Iterator[Check]:
    """Whether rotary settings that the run has changed are the release's; no check of other runs."""
    run = run_of(source)
    if run is None or (run.config.rope_theta is None and run.config.rope_scaling is None):
        return
    found, meant = read_shape(released, ignore_fields=read_config(released)), run.model
    names = ("rope_theta", "rope_scaling", "max_position_embeddings")
    different = [
        f"{name}: {getattr(found, name)} and not {getattr(meant, name)}"
        for name in names
        if getattr(found, name) != getattr(meant, name)
    ]
    before = read_fields(config := read_config(run.hf_folder), find_family(config), run.hf_folder)
    fine = ", ".join(f"{name} {getattr(meant, name)} (changed from {before[name]})" for name in names)
    yield Check.of("rotary settings are those that the run changed to", different, fine)


def _notes(released: Path) -> Iterator[str]:
    """What a user of the release needs to know besides the checks."""
    with suppress(RequestError):
        found = hf_files.describe(released)
        if found.misread:
            yield (
                "transformers 5 reads the release's config.json, transformers 4 takes "
                f"{', '.join(found.misread)}: convert without --keep-config for a release that both read"
            )
        if found.tokenizer != found.stated_tokenizer:
            yield (
                "transformers 5 reads the release's tokenizer_config.json, transformers 4 fails on it: convert without "
                "--keep-config for a release that both read"
            )


def _check_weight_files(released: Path) -> Iterator[Check]:
    located = hf.locate_tensors(released)
    yield Check("the index lists what the files hold", True, f"{len(located)} tensors")
    used = {location.path for location in located.values()}
    stray = [path.name for path in sorted(released.iterdir()) if hf_files.is_weight_file(path) and path not in used]
    yield Check.of("no other weight files", stray, "none")
    sizes = sum(location.meta.nbytes for location in located.values())
    index = released / INDEX_NAME
    if index.is_file():
        total = read_json(index).get("metadata", {}).get("total_size")
        yield Check("total_size of the index", total == sizes, f"{total} listed, {sizes} bytes of tensors")


def _check_side_files(origin: Path, released: Path) -> Iterator[Check]:
    problems: list[str] = []
    same_meaning: list[str] = []
    names = [name for name in _side_names(origin) if name != MODEL_CARD]
    for name in names:
        copy = released / name
        if not copy.is_file():
            problems.append(f"{name} is missing")
        elif hash_file(copy) != hash_file(origin / name):
            meant = in_both_spellings(origin) if name == TOKENIZER_CONFIG else None
            if meant is None or in_both_spellings(released) != meant:
                problems.append(f"{name} differs from the source's")
                continue
            same_meaning.append(f"{name} says the same as the source's in the spelling of transformers 4")
    fine = ", ".join(names) or "none"
    yield Check.of(
        "tokenizer, template and generation files are the source's", problems, "; ".join([fine, *same_meaning])
    )


def _side_names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in hf_files.side_files(folder)]


def _check_other_files(origin: Path, released: Path) -> Iterator[Check]:
    """Nothing is in the release that no other check looks at: transformers reads many files that may be absent."""
    weights = {path.name for path in released.iterdir() if hf_files.is_weight_file(path)}
    known = {*_OF_ITS_OWN, *weights, *_side_names(origin)}
    files = [path for path in released.rglob("*") if path.is_symlink() or not path.is_dir()]
    unknown = [
        path.relative_to(released)
        for path in files
        if str(path.relative_to(released)) not in known
        and not (path.parent == released and hf_files.is_licence(path.name))
    ]
    folders = Counter(path.parts[0] for path in unknown if len(path.parts) > 1)
    listed = sorted(path.name for path in unknown if len(path.parts) == 1)
    listed += [f"{name}/ ({count} file{'s' if count > 1 else ''})" for name, count in sorted(folders.items())]
    action = "; the source has no such files: move them away, and add what you have checked after the gate has passed"
    found = ", ".join(listed) + action if listed else f"{len(files)} files"
    yield Check("every file is one that the source has", not listed, found)


def _check_tokenizer(released: Path, shape: ModelShape, notes: list[str]) -> Iterator[Check]:
    tokenizer = load_tokenizer(released)
    yield Check(
        "token ids fit the embedding",
        tokenizer.largest_id < shape.vocab_size,
        f"largest id {tokenizer.largest_id}, {shape.vocab_size} rows",
    )
    yield from _check_opened_tokenizer(released, tokenizer, notes)
    problems = []
    ends: dict[str, set[int]] = {}
    for name in ("config.json", GENERATION_CONFIG):
        read = read_json if name == GENERATION_CONFIG else lambda path: read_config(path.parent)
        fields = read(released / name) if (released / name).is_file() else {}
        problems += [
            f"{key} {value!r} of {name} is no row"
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            for value in _ids(fields.get(key))
            if type(value) is not int or not -1 <= value < shape.vocab_size
        ]
        if found := set(_ids(fields.get("eos_token_id"))):
            ends[name] = found
    all_ends = sorted(set().union(*ends.values()))
    if tokenizer.eod_id is not None and all_ends and tokenizer.eod_id not in all_ends:
        problems.append(f"the tokenizer ends texts with {tokenizer.eod_id}, the configs with {all_ends}")
    if len(ends) == 2 and not set.intersection(*ends.values()):
        problems.append("eos_token_id is " + " and ".join(f"{sorted(ids)} in {name}" for name, ids in ends.items()))
    yield Check.of("special token ids agree", problems, f"eos {all_ends}, tokenizer {tokenizer.eod_id}")


def _check_opened_tokenizer(released: Path, tokenizer: TokenizerFile, notes: list[str]) -> Iterator[Check]:
    """Whether the installed transformers opens config and tokenizer; a class with rules of its own is noted."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    code = (read_json(released / TOKENIZER_CONFIG) if (released / TOKENIZER_CONFIG).is_file() else {}).get("auto_map")
    yield Check.of("the tokenizer runs no code of the folder", [f"auto_map {code!r}"] if code else [], "no auto_map")
    opened = AutoTokenizer.from_pretrained(
        hf_files.readable_folder(released), local_files_only=True, trust_remote_code=False
    )
    name = f"transformers {version('transformers')}"
    yield Check("transformers opens the tokenizer", True, f"{type(opened).__name__} in {name}")
    own = released / "tokenizer.json"
    stated = Tokenizer.from_file(str(own if own.is_file() else tokenizer.json_path))
    different = [
        prompt
        for prompt, text in prompts.SHORT.items()
        if opened(text, add_special_tokens=False)["input_ids"] != stated.encode(text, add_special_tokens=False).ids
    ]
    if different:
        notes.append(
            f"{name} opens the tokenizer as {type(opened).__name__}, which gives other ids than tokenizer.json for the "
            f"prompts {', '.join(different)}: PreTrainedTokenizerFast.from_pretrained(FOLDER) reads that file as it is"
        )
    largest = max(opened.get_vocab().values(), default=0)
    if largest > tokenizer.largest_id:
        notes.append(
            f"{name} opens the tokenizer as {type(opened).__name__}, which adds tokens of its own up to id {largest}: "
            "PreTrainedTokenizerFast.from_pretrained(FOLDER) adds none"
        )


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
