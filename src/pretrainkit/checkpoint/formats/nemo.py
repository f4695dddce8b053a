"""Writes the `context/` folder of a NeMo 2 checkpoint without importing NeMo.

`context/io.json` is a Fiddle configuration (fiddle.experimental.serialization, version 0.0.1) of NeMo's
`TrainerContext`: which model class with which config and tokenizer, and a trainer. `nemo.lightning.io.
load_context` builds the objects from it. Beside it lie the files that it refers to.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.formats.hf import side_files
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.files import read_json, write_json
from pretrainkit.models.megatron_fields import contradictions, nemo_config_fields, nemo_model

CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""How megatron-core's modules must name what they look for in the checkpoint (`sharded_state_dict(metadata=...)`)."""

TOKENIZER_FOLDER = "nemo_tokenizer"
GENERATION_FOLDER = "artifacts"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Call:
    """A class or function by its importable name, `module:name`, and the arguments to call it with."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Name:
    """An importable object by its name, `module:name`."""

    target: str


def write_context(folder: Path, model: Call, hf_folder: Path) -> None:
    """Write a context for a model (`model_call`) with the tokenizer and generation config of `hf_folder`."""
    folder.mkdir()
    copy_tokenizer(hf_folder, folder / TOKENIZER_FOLDER)
    generation = hf_folder / GENERATION_CONFIG
    if generation.is_file():
        (folder / GENERATION_FOLDER).mkdir()
        shutil.copyfile(generation, folder / GENERATION_FOLDER / GENERATION_CONFIG)
    strategy = Call(
        "nemo.lightning.pytorch.strategies.megatron_strategy:MegatronStrategy", {"ckpt_save_optimizer": False}
    )
    trainer = Call("nemo.lightning.pytorch.trainer:Trainer", {"accelerator": "cpu", "strategy": strategy, "devices": 1})
    context = Call("nemo.lightning.io.pl:TrainerContext", {"model": model, "trainer": trainer, "extra": {}})
    write_json(folder / "io.json", fiddle_json(context))


def copy_tokenizer(hf_folder: Path, target: Path) -> None:
    """Copy what NeMo's AutoTokenizer reads of a model folder into a new one: no weights."""
    target.mkdir(parents=True)
    for path in side_files(hf_folder):
        if path.name != GENERATION_CONFIG:
            shutil.copyfile(path, target / path.name)
    # It reads the class of some tokenizers from config.json.
    shutil.copyfile(hf_folder / "config.json", target / "config.json")


def model_call(shape: ModelShape, dtype: torch.dtype, *, vocabulary_divisor: int, has_generation_config: bool) -> Call:
    """NeMo's model with its config, as a call that isn't made here."""
    nemo = nemo_model(shape)
    settings: dict[str, Any] = {
        **nemo.fields,
        "make_vocab_size_divisible_by": vocabulary_divisor,
        "vocab_size": shape.vocab_size,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": Name(f"torch:{str(dtype).removeprefix('torch.')}"),
    }
    if has_generation_config:
        settings["generation_config"] = Call(
            "nemo.lightning.io.artifact.hf_auto:from_pretrained",
            {
                "auto_cls": Name("transformers.generation.configuration_utils:GenerationConfig"),
                "pretrained_model_name_or_path": f"./{GENERATION_FOLDER}",
            },
        )
    tokenizer = Call(
        "nemo.collections.common.tokenizers.huggingface.auto_tokenizer:AutoTokenizer",
        {"pretrained_model_name": TOKENIZER_FOLDER},
    )
    return Call(nemo.model_class, {"config": Call(nemo.config_class, settings), "tokenizer": tokenizer})


def check_settings(folder: Path, shape: ModelShape) -> None:
    """Raise RequestError when the context of a checkpoint contradicts the shape that it is read with.

    Settings may be absent: nothing is taken from them.
    """
    if problems := contradictions(_read_settings(folder), nemo_config_fields(shape)):
        raise RequestError(
            "; ".join(problems), where=str(folder), needed="the config.json of the model in this checkpoint"
        )


def _read_settings(folder: Path) -> dict[str, Any]:
    """Plain values of the model's config in a context, by name; empty when there is no context."""
    path = folder / "io.json"
    if not path.is_file():
        return {}
    settings: dict[str, Any] = {}
    for node in read_json(path).get("objects", {}).values():
        if "<root>.model.config" in node.get("paths", []):
            for element, value in node["items"]:
                if value.get("type") == "leaf":
                    settings[element.removeprefix("Attr(name='").removesuffix("')")] = value["value"]
    return settings


def fiddle_json(root: Call) -> dict[str, Any]:
    """The JSON that fiddle's serialization gives for a configuration of `root`."""
    writer = _FiddleWriter()
    reference = writer.call(root, "<root>")
    return {"root": reference, "objects": writer.objects, "refcounts": writer.refcounts, "version": "0.0.1"}


class _FiddleWriter:
    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.refcounts: dict[str, int] = {}

    def _add(self, hint: str, value: dict[str, Any]) -> dict[str, Any]:
        number = 1
        while f"{hint}_{number}" in self.objects:
            number += 1
        key = f"{hint}_{number}"
        self.objects[key], self.refcounts[key] = value, 1
        return {"type": "ref", "key": key}

    def _container(self, name: str, items: list[Any], metadata: Any) -> dict[str, Any]:
        return self._add(name, {"type": _pyref("builtins:" + name), "items": items, "metadata": metadata})

    def _empty_dict(self) -> dict[str, Any]:
        return self._container("dict", [], {"type": _pyref("builtins:tuple"), "items": [], "metadata": None})

    def call(self, call: Call, path: str) -> dict[str, Any]:
        """A `fdl.Config` node."""
        names = [[f"Index(index={i})", name] for i, name in enumerate(call.arguments)]
        about = [
            ["Attr(name='fn_or_cls')", _pyref(call.target)],
            ["Attr(name='argument_names')", self._container("tuple", names, None)],
            ["Attr(name='argument_tags')", self._empty_dict()],
            ["Attr(name='argument_history')", self._empty_dict()],
        ]
        kind = _pyref("fiddle._src.config:BuildableTraverserMetadata")
        metadata = self._add("buildable_traverser_metadata", {"type": kind, "items": about, "metadata": kind})
        items = [
            [f"Attr(name={name!r})", self.value(value, f"{path}.{name}")] for name, value in call.arguments.items()
        ]
        node = {
            "type": _pyref("fiddle._src.config:Config"),
            "items": items,
            "metadata": metadata,
            "paths": [path],
        }
        return self._add(call.target.rpartition(":")[2].lower(), node)

    def value(self, value: Any, path: str) -> dict[str, Any]:
        """A node for an argument."""
        if isinstance(value, Call):
            return self.call(value, path)
        if isinstance(value, Name):
            return {**_pyref(value.target), "paths": [path]}
        if value == {}:
            return self._empty_dict()
        return {"type": "leaf", "value": value, "paths": [path]}


def _pyref(target: str) -> dict[str, str]:
    module, _, name = target.partition(":")
    return {"type": "pyref", "module": module, "name": name}


def common_state() -> dict[str, Any]:
    """What NeMo keeps unsharded in `weights/common.pt`, for a model at step 0 without optimizer."""
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": {},
        "loops": {},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        "content_metadata": dict(CONTENT_METADATA),
    }
