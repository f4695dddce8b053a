"""What an evaluation records."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import tiny_run

from pretrainkit.config.schema import DatasetFacts, ResolvedRun, ValidationSet
from pretrainkit.run.held_out import describe_losses, position_ranges, validation_record


def run_of(tmp_path: Path, *, sequence_length: int = 64) -> ResolvedRun:
    run = tiny_run(tmp_path)
    data = replace(run.config.data, sequence_length=sequence_length)
    return replace(run, config=replace(run.config, data=data))


def facts(*prefixes: str, **known: object) -> DatasetFacts:
    return replace(DatasetFacts(prefixes, (), 10, 1, None, "h"), **known)


def test_losses_are_means_over_tokens_and_bits_count_the_bytes_of_text(tmp_path: Path) -> None:
    """Two prefixes of one part, a third that is another, and a set with a label of its own."""
    own = facts(
        *("/a.0", "/a.1", "/b"),
        part_names=("a", "a", "b"),
        labels=("en", "ja"),
        label_bytes_per_token={"en": 4.0, "ja": 2.0},
    )
    named = ValidationSet("wiki", facts("/w", labels=("ja", "ko"), label_bytes_per_token={"ja": 2.0, "ko": 0.0}), 1)
    run = replace(run_of(tmp_path), dataset=own, validation_sets=(named,))
    losses = [[10.0, 0, 0, 0], [30.0, 4.0, 0, 0], [0, 6.0, 0, 0], [0, 9.0, 1.0, 0]]
    tokens = [[10, 0, 0, 0], [20, 2, 0, 0], [0, 4, 0, 0], [0, 6, 2, 0]]
    sums = (np.array(values, dtype=float)[..., None] for values in (losses, tokens))
    record = validation_record(run, ["en", "ja", "ko", "other"], *sums)
    assert record["val_loss"] == pytest.approx(50 / 36) and record["val_tokens"] == 36
    assert record["val_bits_per_byte"] == pytest.approx(50 / math.log(2) / (30 * 4 + 6 * 2))
    assert record["val_loss_by_part"] == {"a": pytest.approx(44 / 32), "b": 1.5}
    assert record["val_loss_by_label"] == {"en": pytest.approx(40 / 30), "ja": pytest.approx(10 / 6)}
    assert record["val_tokens_by_label"] == {"en": 30, "ja": 6}
    assert record["val_loss_by_set"] == {"wiki": 1.25, "wiki/ja": 1.5, "wiki/ko": 0.5}
    assert set(record["val_bits_per_byte_by_set"]) == {"wiki/ja"}, "the bytes of ko are not known"
    assert describe_losses(record).endswith("bits per byte): wiki 1.2500, wiki/ja 1.5000, wiki/ko 0.5000")


def test_without_a_validation_split_the_loss_is_that_of_the_sets(tmp_path: Path) -> None:
    sets = tuple(ValidationSet(name, facts(f"/{name}"), 1) for name in ("x", "y"))
    run = replace(run_of(tmp_path), dataset=facts("/a"), validation_sets=sets)
    record = validation_record(run, ["other"], np.array([[[0.0]], [[3.0]], [[9.0]]]), np.array([[[0]], [[2]], [[2]]]))
    assert record == {
        "val_loss": 3.0,
        "val_tokens": 4,
        "val_loss_by_set": {"x": 1.5, "y": 4.5},
        "val_tokens_by_set": {"x": 2, "y": 2},
    }


def test_losses_by_position_are_those_of_ranges_that_double(tmp_path: Path) -> None:
    assert position_ranges(64) == [0] and position_ranges(65) == [0, 64] and position_ranges(128) == [0, 64]
    assert position_ranges(8192) == [0, 64, 128, 256, 512, 1024, 2048, 4096]
    run = replace(run_of(tmp_path, sequence_length=256), dataset=facts("/a"))
    record = validation_record(run, ["other"], np.array([[[6.0, 0.0, 4.0]]]), np.array([[[2.0, 0.0, 4.0]]]))
    assert record["val_loss"] == 10 / 6
    assert record["val_loss_by_position"] == {"0": 3.0, "128": 1.0}
    assert record["val_tokens_by_position"] == {"0": 2, "128": 4}
