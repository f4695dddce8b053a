"""The flags of pretrain.py are those that its users know, with the schema's types and defaults."""

from __future__ import annotations

import pytest

from pretrainkit.cli import Parser
from pretrainkit.config.load import load_config
from pretrainkit.config.parser import add_run_flags, given_flags
from pretrainkit.config.schema import OPTIONS, RunConfig

FLAGS = [option for option in OPTIONS.values() if option.flag]

ESTABLISHED = [
    ("--executor", None, str, "local"),
    ("--experiment", "-E", str, "llama31_pretraining"),
    ("--account", "-a", str, "root"),
    ("--partition", "-p", str, "defq"),
    ("--container_image", "-i", str, "nvcr.io/nvidia/nemo:dev"),
    ("--num_nodes", "-N", int, 1),
    ("--num_gpus", "-G", int, 8),
    ("--hf_model_id", None, str, ""),
    ("--nemo_model", "-n", str, None),
    ("--dataset_path", None, str, ""),
    ("--max_steps", None, int, None),
    ("--global_batch_size", "-g", int, 2048),
    ("--micro_batch_size", "-m", int, 1),
    ("--tensor_model_parallel_size", "-T", int, 1),
    ("--pipeline_model_parallel_size", "-P", int, 1),
    ("--context_parallel_size", "-C", int, 1),
    ("--sequence_length", None, int, 8192),
]
"""Name, short form, type and default as scripts around the world use them."""


def parse(*words: str) -> RunConfig:
    parser = Parser()
    add_run_flags(parser)
    arguments = parser.parse_args(words)
    return load_config(arguments.config_files, given_flags(arguments), arguments.assignments)


@pytest.mark.parametrize(("name", "short", "type_", "default"), ESTABLISHED, ids=[row[0] for row in ESTABLISHED])
def test_established_flags_keep_their_meaning(name: str, short: str | None, type_: type, default: object) -> None:
    option = next(option for option in FLAGS if option.flag == name)
    assert option.short == short
    assert option.type is type_
    # What an unset account, partition or image means depends on the scheduler: this is Slurm's.
    assert option.default == default or option.unset.startswith(str(default))


def test_no_flag_is_there_twice() -> None:
    names = [name for option in FLAGS for name in (option.flag, option.short) if name]
    assert len(names) == len(set(names))


SPELLINGS = [
    (spelling, option.name)
    for option in FLAGS
    for spelling in (option.flag, option.flag.replace("_", "-"), option.short)
    if spelling
]


@pytest.mark.parametrize(("spelling", "field"), SPELLINGS, ids=[spelling for spelling, _ in SPELLINGS])
def test_every_flag_sets_its_field_in_every_spelling(spelling: str, field: str) -> None:
    typed = {int: 7, float: 0.5, str: "word", bool: True, tuple: ("/word",), dict: {"NAME": "a = ${b}"}}
    value = "one-machine" if field == "launch.site" else typed[OPTIONS[field].type]
    text = {tuple: "/word", dict: "NAME=a = ${b}"}.get(type(value), str(value))
    words = [spelling] if value is True else [spelling, text]
    assert OPTIONS[field].value_in(parse(*words)) == value


def test_without_flags_all_defaults_are_the_schemas() -> None:
    assert parse() == RunConfig()
