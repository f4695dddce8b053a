"""What is wrong with tokenizer, data and environment is told without running anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from indexed_writer import IndexedDatasetWriter

from pretrainkit.diagnosis import checks, data_checks
from pretrainkit.diagnosis.checks import FINE, WARN, Check


def warned(found: list[Check]) -> list[str]:
    """What was warned of."""
    return [check.what for check in found if check.state == WARN]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pad_token": "<pad>", "eos_token": "</s>"}, []),
        ({"pad_token": "</s>", "eos_token": {"content": "</s>"}}, ["padding token"]),
        ({"pad_token": "<pad>", "eos_token": "</s>", "padding_side": "left"}, ["padding side"]),
        ({"pad_token": "<pad>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}, ["padding side"]),
        ({"eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}, []),
        ({"pad_token": "<pad>"}, ["end of documents"]),
    ],
    ids=["fine", "PAD = EOS", "left", "left by default", "left without PAD", "no EOS"],
)
def test_tokenizer(tmp_path: Path, config: dict[str, Any], expected: list[str]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert warned(checks.check_tokenizer(tmp_path)) == expected


def test_the_projects_tokenizer_is_fine(tokenizer_folder: Path) -> None:
    assert warned(checks.check_tokenizer(tokenizer_folder)) == []


def write_pair(prefix: Path, documents: list[list[int]]) -> None:
    """A .bin/.idx pair without a manifest."""
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for ids in documents:
            writer.add_document(ids)


def test_the_amount_of_data_is_counted(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[5, 6, 1], [7, 1]])
    found = data_checks.check_data(str(tmp_path / "a"))
    assert any("2 documents, 5 tokens" in check.found for check in found)


def test_raw_text_is_told_to_be_prepared(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert "data format" in warned(data_checks.check_data(str(tmp_path)))
    assert "data format" in warned(data_checks.check_data(str(tmp_path / "a.jsonl")))


def test_many_small_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "MANY_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("x")
    assert "number of files" in warned(data_checks.check_place(tmp_path))


def test_file_system_of_a_path() -> None:
    assert data_checks.file_system(Path("/proc/self")) == "proc"


def test_debug_variables_that_are_off_or_do_nothing_here_are_left_out() -> None:
    variables = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "PYTHONDEVMODE": "1",
        "NCCL_DEBUG": "WARN",
    }
    assert set(checks.debug_variables(variables, on_gpu=True)) == {"CUDA_LAUNCH_BLOCKING", "PYTHONDEVMODE"}
    assert set(checks.debug_variables(variables, on_gpu=False)) == {"PYTHONDEVMODE"}
    assert [check.state for check in checks.check_environment({}, on_gpu=True)] == [FINE]


@pytest.mark.parametrize(
    ("tokenizer", "counts", "expected"),
    [
        ({"pad_token_id": 2}, {"ends": 4, "masked_ends": 4, "ended_rows": 4}, ["padding token"]),
        ({"pad_token_id": 2}, {"ends": 4, "ended_rows": 4}, []),
        ({"pad_token_id": 2}, {}, ["padding token"]),
        ({"pad_token_id": 0}, {"ends": 4, "masked_ends": 2, "ended_rows": 4}, ["EOS in the loss"]),
        ({"pad_token_id": 0}, {"unended_rows": 3, "ended_rows": 1}, ["ends of documents in batches"]),
        ({"pad_token_id": 0, "padding_side": "left"}, {"double_bos": 1}, ["padding side", "BOS in batches"]),
    ],
    ids=["masked", "not masked", "unknown", "PAD of its own", "no EOS", "left and two BOS"],
)
def test_batches_show_what_the_tokenizer_does(
    tokenizer: dict[str, Any], counts: dict[str, int], expected: list[str]
) -> None:
    assert warned(checks.check_batches([counts], {"eos_token_id": 2, **tokenizer})) == expected


def test_rows_of_text_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 300)
    assert any("text: 300 rows" in check.found for check in data_checks.check_data(str(tmp_path / "a.jsonl")))
    monkeypatch.setattr(data_checks, "LOOKED_AT_BYTES", 90)
    assert any("about 300 rows" in check.found for check in data_checks.check_data(str(tmp_path / "a.jsonl")))
