"""The flags of pretrain.py are those that its users know, with the schema's types and defaults."""

from __future__ import annotations

import pytest

from pretrainkit.cli import Parser
from pretrainkit.config.fields import FIELDS, value_of
from pretrainkit.config.flags import FLAGS, add_run_flags, given_flags
from pretrainkit.config.load import load_config
from pretrainkit.config.schema import RunConfig

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
    flag = next(flag for flag in FLAGS if flag.name == name)
    assert flag.short == short
    assert FIELDS[flag.field].type is type_
    # What an unset account, partition or image means depends on the scheduler: this is Slurm's.
    assert FIELDS[flag.field].default == default or (flag.default_word or "").startswith(str(default))


def test_no_flag_is_there_twice() -> None:
    names = [name for flag in FLAGS for name in (flag.name, flag.short) if name]
    assert len(names) == len(set(names))
    assert len({flag.field for flag in FLAGS}) == len(FLAGS)


SPELLINGS = [
    (spelling, flag.field)
    for flag in FLAGS
    for spelling in (flag.name, flag.name.replace("_", "-"), flag.short)
    if spelling
]


@pytest.mark.parametrize(("spelling", "field"), SPELLINGS, ids=[spelling for spelling, _ in SPELLINGS])
def test_every_flag_sets_its_field_in_every_spelling(spelling: str, field: str) -> None:
    typed = {int: 7, float: 0.5, str: "word", bool: True, tuple: ("/word",), dict: {"NAME": "a = ${b}"}}
    value = "one-machine" if field == "launch.site" else typed[FIELDS[field].type]
    text = {tuple: "/word", dict: "NAME=a = ${b}"}.get(type(value), str(value))
    words = [spelling] if value is True else [spelling, text]
    assert value_of(parse(*words), field) == value


def test_without_flags_all_defaults_are_the_schemas() -> None:
    assert parse() == RunConfig()
