"""The files of a Hugging Face model folder: which ones hold its weights, and config.json, tokenizer, licence, ..."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrainkit import hf_tokenizer
from pretrainkit.errors import RequestError
from pretrainkit.files import hash_samples, read_json, write_json
from pretrainkit.models import hf_config
from pretrainkit.models.multimodal import is_multimodal, text_config, with_text_config
from pretrainkit.models.registry import find_family, read_config, read_whole_config

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HF_SOURCE = "hf_source"
"""Folder inside a Megatron checkpoint with the model's config.json and side files."""
REPORT_NAME = "conversion.json"
"""File in a converted checkpoint with the report of its conversion."""
ORIGIN_NAME = "pretrainkit_origin.json"
"""File that states what a checkpoint was made of (`checkpoint.origin`); not copied: training changes the weights."""
QUANTIZATION = "quantization_config"
"""Field of config.json that says in which form the weights are stored."""
GENERATION_CONFIG = "generation_config.json"
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""What the first part of a fingerprint reads of each weight file besides the header."""
WINDOWS = 16384
"""Windows of 4 KiB that its second part reads of all tensors (64 MiB)."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_SIDE_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py", ".md", ".vocab", ".bpe")
_NEVER_COPIED = {
    "config.json",
    ORIGIN_NAME,
    INDEX_NAME,
    "pytorch_model.bin.index.json",
    "trainer_state.json",
    "training_args.bin",
}
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_CHAT_TEMPLATES = "additional_chat_templates"
"""The one folder that transformers itself puts into a model's: chat templates by name."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model, sorted; they need not all exist. Empty when there are no weights.

    A folder may hold other weights too, such as Mistral's consolidated file.
    Raises RequestError when transformers would load another file than those that the index lists.
    """
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if not index.is_file():
        return [single] if single.is_file() else []
    names = set(read_json(index)["weight_map"].values())
    if single.is_file() and SINGLE_NAME not in names:
        raise RequestError(
            f"{SINGLE_NAME} and an index of other files: two models",
            where=str(folder),
            needed="one of them: transformers loads the file, other tools what the index lists",
            action=f"move {SINGLE_NAME}, or {INDEX_NAME} with its files, away",
        )
    return [folder / name for name in sorted(names)]


def weights_fingerprint(folder: Path) -> str:
    """A hash of the sizes, headers and samples of a folder's weight files, and after `+` one of samples of each tensor.

    It distinguishes models, including retrained ones, but may miss a few changed values, unlike a hash of all bytes. Of
    each tensor n windows are sampled, 16384 over the number of tensors, at least 4: 56 for Llama 7B. A tensor of up to
    n * 4 KiB is read whole; in a larger one with R rows of B bytes, a changed row is seen with probability
    p = n * (1 + 4096 / B) / R, and k changed rows with 1 - (1 - p)^k.
    """
    digest, tensors = hashlib.sha256(), list[tuple[Path, int, int]]()
    for path in weight_files(folder):
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = min(size, 8 + int.from_bytes(file.read(8), "little"))
            digest.update(f"{size} ".encode())
            file.seek(0)
            digest.update(header := file.read(header_bytes))
            for sample in range(_SAMPLES):
                file.seek(header_bytes + (size - header_bytes) * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
        with suppress(ValueError):  # refused where it is opened
            places = [each["data_offsets"] for name, each in json.loads(header[8:]).items() if name != "__metadata__"]
            tensors += [(path, header_bytes + begin, header_bytes + end) for begin, end in sorted(places)]
    return f"{digest.hexdigest()}+{hash_samples(tensors, num_windows=WINDOWS)}"


def is_weight_file(path: Path) -> bool:
    """Whether a file of a model folder holds weights, in any format.

    `tokenizer.model` does where transformers made the folder from a GGUF file: it saves the entire GGUF as that.
    """
    if not path.is_file():
        return False
    if path.name == "tokenizer.model":
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    return path.name.endswith(_WEIGHT_SUFFIXES) and not path.name.startswith("tokenizer")


def check_no_adapter(folder: Path) -> None:
    """Raise RequestError when a model folder holds a PEFT adapter: transformers would load it onto the weights."""
    files = [path for pattern in ("adapter_config.json", "adapter_model*") for path in folder.glob(pattern)]
    if names := [path.name for path in files]:
        raise RequestError(
            f"{', '.join(names)}: a PEFT adapter, which isn't part of the weights",
            where=str(folder),
            needed="a model without adapter",
            action="merge it first: peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload()"
            ".save_pretrained(MERGED); or move the adapter's files away to take the weights without it",
        )


def is_licence(name: str) -> bool:
    """Whether a file of this name is a licence or another legal text."""
    return name.startswith(_LICENCES)


def side_files(folder: Path) -> list[Path]:
    """The files of a model folder that go along with its weights: tokenizer, chat template, generation config, ..."""
    return sorted((folder / _CHAT_TEMPLATES).glob("*.jinja")) + [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.name not in _NEVER_COPIED
        and not path.name.startswith(".")
        and not is_weight_file(path)
        and (path.suffix in _SIDE_SUFFIXES or is_licence(path.name))
    ]


def copy_side_files(source: Path, target: Path, *, leave_out: Collection[str] = ()) -> None:
    """Copy the side files of a model folder byte for byte."""
    for path in side_files(source):
        if path.name not in leave_out:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def other_files(folder: Path) -> list[str]:
    """What a model folder holds besides the model, a folder as one entry: no conversion carries it.

    Raises RequestError when it holds two models.
    """
    known = {
        folder / "config.json",
        folder / ORIGIN_NAME,
        folder / INDEX_NAME,
        *weight_files(folder),
        *side_files(folder),
    }
    known |= {path.parent for path in known}
    return [f"{path.name}/" if path.is_dir() else path.name for path in sorted(folder.iterdir()) if path not in known]


def copy_description(
    source: Path, target: Path, *, leave_out: Collection[str] = (), config: Mapping[str, Any] | None = None
) -> None:
    """Copy config.json and side files into a new folder; the (text) model's config.json may be another, `config`."""
    target.mkdir()
    if config is None or config == read_config(source):
        shutil.copyfile(source / "config.json", target / "config.json")
    else:
        write_json(target / "config.json", with_text_config(read_whole_config(source), config))
    copy_side_files(source, target, leave_out=leave_out)


@dataclass(frozen=True)
class Description:
    """config.json and tokenizer_config.json of a model folder, as they are and as a release has them."""

    folder: Path
    stated: dict[str, Any]
    """config.json of the folder, with all parts of a multimodal model."""
    config: dict[str, Any]
    """In the spelling of both generations of transformers."""
    stated_tokenizer: dict[str, Any] | None
    tokenizer: dict[str, Any] | None
    """None where the folder has no tokenizer_config.json."""
    misread: list[str]
    """What transformers 4 takes from the config.json of the folder instead of what it means."""

    @property
    def notes(self) -> list[str]:
        """Sentences about what a release has that the folder doesn't, and the other way round."""
        stated, config = (text_config(each, str(self.folder)) for each in (self.stated, self.config))
        files = [("config.json", stated, config)]
        files += [(hf_tokenizer.CONFIG_NAME, self.stated_tokenizer or {}, self.tokenizer or {})]
        notes = []
        for name, stated, written in files:
            changes = [
                f"{key} {json.dumps(value)}" for key, value in written.items() if stated.get(key, _NONE) != value
            ]
            replaced = {key: value for key, value in stated.items() if written.get(key, _NONE) != value}
            if changes or replaced:
                before = "".join(f", {key} {json.dumps(value)}" for key, value in replaced.items())
                instead = f" instead of {before[2:]}" if before else " added"
                notes.append(f"{name}: {', '.join(changes)}{instead}: transformers 4 and 5 read the same")
        return notes


_NONE = object()


def describe(folder: Path) -> Description:
    """Read the config.json and tokenizer_config.json of a model folder in either spelling.

    Raises RequestError when a family is unknown or fields contradict each other.
    """
    stated, where = read_config(folder), str(folder / "config.json")
    family = find_family(stated, where)
    whole = read_whole_config(folder)
    return Description(
        folder,
        whole,
        with_text_config(whole, hf_config.in_both_spellings(stated, family, where)),
        hf_tokenizer.read_config(folder),
        hf_tokenizer.in_both_spellings(folder),
        hf_config.misread_by_4(stated, family, where),
    )


def readable_folder(folder: Path) -> Path:
    """A folder of the same model that the installed transformers reads with the meaning that the config.json has.

    `folder` itself where it does, and where its family is not known; otherwise a temporary one, for the life of the
    process.
    """
    rewritten = {}
    if hf_tokenizer.installed_generation() < 5 and (folder / "config.json").is_file():
        with suppress(RequestError):
            found = describe(folder)
            rewritten = {"config.json": found.config} if found.misread else {}
    return hf_tokenizer.readable_folder(folder, rewritten)


def model_class(folder: Path) -> Any:
    """The class of transformers that opens a model with a head for the next token: a multimodal one with all parts."""
    import transformers

    is_whole = is_multimodal(read_whole_config(folder))
    return transformers.AutoModelForImageTextToText if is_whole else transformers.AutoModelForCausalLM


def text_runner(model: Any) -> Any:
    """The part of an opened model that runs on text: the model itself, or within Llama 4's its text model with a head.

    Llama 4's multimodal class fails in transformers 5.24 at the end of every forward pass (`image_outputs`).
    """
    inner = getattr(model, "language_model", None)
    return inner if hasattr(inner, "lm_head") else model


def write_description(folder: Path, hf_folder: Path, dtype: torch.dtype, *, keep: bool) -> None:
    """Write the config.json and side files of a release, into the folder of its weights.

    Both generations of transformers read them with the same meaning; with `keep`, they are copied byte for byte.
    """
    if keep:
        if QUANTIZATION in read_config(hf_folder):
            raise RequestError(
                f"{QUANTIZATION} in config.json, which isn't to be changed",
                where=str(hf_folder),
                needed="no such field: the weights are written in bf16",
                action="leave out --keep-config",
            )
        shutil.copyfile(hf_folder / "config.json", folder / "config.json")
        copy_side_files(hf_folder, folder)
        return
    found = describe(hf_folder)
    write_config(folder, found.config, dtype)
    if found.tokenizer == found.stated_tokenizer:
        copy_side_files(hf_folder, folder)
    else:
        copy_side_files(hf_folder, folder, leave_out=(hf_tokenizer.CONFIG_NAME,))
        write_json(folder / hf_tokenizer.CONFIG_NAME, found.tokenizer)


def write_config(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Write `config` as config.json with another dtype and without a local `_name_or_path`.

    The form is that of transformers: two spaces, keys sorted, a newline at the end.
    """
    config, name = dict(config), str(config.get("_name_or_path", ""))
    if name.startswith(("/", ".", "~")) or (name and Path(name).exists()):
        del config["_name_or_path"]
    stated, names = str(dtype).removeprefix("torch."), ("dtype", "torch_dtype")
    config.pop(QUANTIZATION, None)  # weights are written as they are used
    config |= dict.fromkeys([field for field in names if field in config] or ["torch_dtype"], stated)
    if is_multimodal(config):
        text = config["text_config"]
        config["text_config"] = text | {field: stated for field in names if field in text}
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
