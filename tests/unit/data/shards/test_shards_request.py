"""Which shard a task makes, and what a tokenizer's template adds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from pretrainkit.data.job_array import parse_shard_id
from pretrainkit.data.shards.request import ShardRequest, check_shard_id, make_shard_plan
from pretrainkit.data.tokens.template import template_ids
from pretrainkit.errors import RequestError

TEMPLATES = {
    "none": None,
    "byte-level": processors.ByteLevel(),
    "bos": processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]),
    "bos-eos": processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    ),
    "sequence": processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]),
        ]
    ),
    "roberta": processors.RobertaProcessing(("<|end|>", 1), ("<|begin|>", 0)),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_ids_are_those_that_tokenizers_adds(name: str, tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    if TEMPLATES[name] is not None:
        tokenizer.post_processor = TEMPLATES[name]
    text = "some words"
    first, last = template_ids(json.loads(tokenizer.to_str()).get("post_processor"))
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    assert [*first, *plain, *last] == tokenizer.encode(text).ids


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "7"}, 7),
        ({"PBS_ARRAY_INDEX": "0"}, 0),
        ({"SGE_TASK_ID": "1"}, 0),
        ({"SGE_TASK_ID": "undefined", "PBS_ARRAY_INDEX": "3"}, 3),
    ],
    ids=["slurm-one-task-again", "pbs", "grid-engine", "grid-engine-no-array"],
)
def test_an_array_task_makes_the_shard_of_its_number(environment: dict[str, str], wanted: int) -> None:
    assert parse_shard_id(None, 0, environment) == wanted
    assert parse_shard_id(None, 1000, environment) == wanted + 1000
    assert parse_shard_id("5", 0, environment) == 5


@pytest.mark.parametrize("environment", [{}, {"SLURM_ARRAY_TASK_ID": ""}, {"SGE_TASK_ID": "undefined"}], ids=str)
def test_without_a_number_no_shard_is_chosen(environment: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="--all"):
        parse_shard_id(None, 0, environment)


def test_more_tasks_than_files_are_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    for number in range(3):
        (tmp_path / f"part{number}.txt").write_text("text\n")
    plan = make_shard_plan(ShardRequest((str(tmp_path),), tmp_path / "out", str(tokenizer_folder)))
    check_shard_id(2, plan)
    with pytest.raises(RequestError, match=r"shard 3 of 3 input files[\s\S]*0-2"):
        check_shard_id(3, plan)
