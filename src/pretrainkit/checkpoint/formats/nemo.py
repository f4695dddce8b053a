"""The files of a NeMo 2 checkpoint around its weights, written without importing NeMo.

`context/io.json` is a Fiddle configuration (fiddle.experimental.serialization, version 0.0.1) of NeMo's
`TrainerContext`: the model class with its config and tokenizer, and a trainer. `nemo.lightning.io.load_context`
builds the objects from it. The files that it refers to are in the same folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pretrainkit import hf_tokenizer
from pretrainkit.checkpoint.formats.hf_files import GENERATION_CONFIG, copy_description
from pretrainkit.config.schema import ModelShape
from pretrainkit.files import read_json, write_json
from pretrainkit.models.megatron_fields import NEUTRAL, NemoModel, check_stored, nemo_config_fields, nemo_model
from pretrainkit.models.nemo_defaults import NEMO_DEFAULTS

CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""How megatron-core's modules must name what they look for in the checkpoint (`sharded_state_dict(metadata=...)`)."""

TOKENIZER_FOLDER = "nemo_tokenizer"
GENERATION_FOLDER = "artifacts"


def write_context(
    folder: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    hf_folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    vocabulary_divisor: int,
    further: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the context of a model with the tokenizer and generation config of `hf_folder`.

    `config` is the model's config.json, where that of `hf_folder` isn't; `further` are fields of NeMo's config class to
    add.
    """
    folder.mkdir()
    # AutoTokenizer reads the class of some tokenizers from config.json.
    copy_description(hf_folder, folder / TOKENIZER_FOLDER, leave_out=(GENERATION_CONFIG,), config=config)
    if (tokenizer := hf_tokenizer.in_both_spellings(hf_folder)) != hf_tokenizer.read_config(hf_folder):
        write_json(folder / TOKENIZER_FOLDER / hf_tokenizer.CONFIG_NAME, tokenizer)
    generation = hf_folder / GENERATION_CONFIG
    if generation.is_file():
        (folder / GENERATION_FOLDER).mkdir()
        shutil.copyfile(generation, folder / GENERATION_FOLDER / GENERATION_CONFIG)
    model = nemo_model(shape)
    fields = model.fields | {
        "make_vocab_size_divisible_by": vocabulary_divisor,
        "vocab_size": shape.vocab_size,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": _pyref(f"torch:{str(dtype).removeprefix('torch.')}"),
        **further,
    }
    write_json(folder / "io.json", _context(replace(model, fields=fields), has_generation_config=generation.is_file()))


def _context(model: NemoModel, *, has_generation_config: bool) -> dict[str, Any]:
    """The JSON that fiddle's serialization gives for a TrainerContext of the model."""
    objects: dict[str, Any] = {}

    def config(path: str, target: str, **arguments: Any) -> dict[str, Any]:
        """Add the `fdl.Config` of a call of `target` ("module:name") at a path of the configuration.

        Arguments are plain values, or nodes (as dicts). Gives a reference to it.
        """
        names = [[f"Index(index={i})", name] for i, name in enumerate(arguments)]
        metadata = [
            ["Attr(name='fn_or_cls')", _pyref(target)],
            ["Attr(name='argument_names')", {"type": _pyref("builtins:tuple"), "items": names, "metadata": None}],
            ["Attr(name='argument_tags')", _EMPTY_DICT],
            ["Attr(name='argument_history')", _EMPTY_DICT],
        ]
        metadata_type = _pyref("fiddle._src.config:BuildableTraverserMetadata")
        nodes = {
            name: value if isinstance(value, dict) else {"type": "leaf", "value": value, "paths": [f"{path}.{name}"]}
            for name, value in arguments.items()
        }
        key = f"{target.rpartition(':')[2].lower()}_1"
        objects[key] = {
            "type": _pyref("fiddle._src.config:Config"),
            "items": [[f"Attr(name={name!r})", node] for name, node in nodes.items()],
            "metadata": {"type": metadata_type, "items": metadata, "metadata": metadata_type},
            "paths": [path],
        }
        return {"type": "ref", "key": key}

    fields = dict(model.fields)
    if has_generation_config:
        fields["generation_config"] = config(
            "<root>.model.config.generation_config",
            "nemo.lightning.io.artifact.hf_auto:from_pretrained",
            auto_cls=_pyref("transformers.generation.configuration_utils:GenerationConfig"),
            pretrained_model_name_or_path=f"./{GENERATION_FOLDER}",
        )
    strategy_class = "nemo.lightning.pytorch.strategies.megatron_strategy:MegatronStrategy"
    strategy = config("<root>.trainer.strategy", strategy_class, ckpt_save_optimizer=False)
    tokenizer_class = "nemo.collections.common.tokenizers.huggingface.auto_tokenizer:AutoTokenizer"
    tokenizer = config("<root>.model.tokenizer", tokenizer_class, pretrained_model_name=TOKENIZER_FOLDER)
    model_config = config("<root>.model.config", model.config_class, **fields)
    root = config(
        "<root>",
        "nemo.lightning.io.pl:TrainerContext",
        model=config("<root>.model", model.model_class, config=model_config, tokenizer=tokenizer),
        trainer=config(
            "<root>.trainer", "nemo.lightning.pytorch.trainer:Trainer", accelerator="cpu", strategy=strategy, devices=1
        ),
        extra=_EMPTY_DICT,
    )
    return {"root": root, "objects": objects, "refcounts": dict.fromkeys(objects, 1), "version": "0.0.1"}


def _pyref(target: str) -> dict[str, str]:
    module, _, name = target.partition(":")
    return {"type": "pyref", "module": module, "name": name}


_EMPTY_DICT = {
    "type": _pyref("builtins:dict"),
    "items": [],
    "metadata": {"type": _pyref("builtins:tuple"), "items": [], "metadata": None},
}


def check_settings(folder: Path, shape: ModelShape) -> None:
    """Raise RequestError when the context of a checkpoint contradicts the shape that it is read with.

    A setting that is absent has the default of its class, if that is one of NeMo's. The context itself may be absent.
    """
    path = folder / "io.json"
    nodes = read_json(path).get("objects", {}).values() if path.is_file() else ()
    for node in nodes:
        if "<root>.model.config" not in node.get("paths", []):
            continue
        settings = {
            element.removeprefix("Attr(name='").removesuffix("')"): value.get("value", "a structure")
            for element, value in node["items"]
        }
        name = dict(node["metadata"]["items"])["Attr(name='fn_or_cls')"]["name"]
        known = NEMO_DEFAULTS.get(name)
        absent = {**NEUTRAL, **known} if known is not None else {}
        check_stored(settings, nemo_config_fields(shape), folder, absent=absent)


def common_state() -> dict[str, Any]:
    """The content of `weights/common.pt`: what NeMo keeps unsharded of a model at step 0 without optimizer."""
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
