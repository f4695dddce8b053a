"""Samples that are too large for their shard's table are bad records; how a large tar is written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import xxhash

from pretrainkit.data.shards import blocks
from pretrainkit.data.shards.blocks import InputReader
from pretrainkit.data.shards.build import HashedFile
from pretrainkit.data.shards.request import ShardRequest, make_shard_plan
from pretrainkit.data.tokens.encoder import EngineSpec, load_encoder


@pytest.mark.parametrize("most", [20, 4])
def test_a_sample_whose_size_its_table_cannot_hold_is_a_bad_record(
    most: int, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MAX_TOKENS", most)
    source = tmp_path / "in.txt"
    source.write_text("e\ne\n\neeeeeeeeeeeeeeee\ne\n")
    plan = make_shard_plan(ShardRequest((str(source),), tmp_path / "out", str(tokenizer_folder)))
    reader = InputReader(plan.sources, plan.items(0), plan.task.rules)
    (block,) = reader.blocks("sample_0_")
    encoder = load_encoder(EngineSpec("tokenizers", str(plan.tokenizer.json_path), special_tokens=False))
    piece = plan.task.open(encoder, 0)(block)
    assert [block.line_number(bad.line) for bad in piece.rejects] == ([] if most == 20 else [4])
    assert piece.counts["num_samples"] + piece.counts["num_rejected"] == piece.counts["num_records"] == 4
    assert all("more than the 4 that a sample may have" in bad.found for bad in piece.rejects)
    assert sum(map(len, piece.samples)) == piece.counts["num_samples"]


def test_a_file_is_whole_and_hashed_and_its_pages_are_given_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(HashedFile, "STEP_BYTES", 1000)
    monkeypatch.setattr(HashedFile, "WINDOW_BYTES", 2500)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, begin, size, __: advised.append((begin, begin + size)))
    parts = [os.urandom(700) for _ in range(9)]
    with contextlib.ExitStack() as stack:
        file = HashedFile(tmp_path / "x", stack)
        for part in parts:
            file.write(part)
        assert file.num_bytes == 6300
    assert (tmp_path / "x").read_bytes() == b"".join(parts)
    assert file.hash.hexdigest() == xxhash.xxh3_128_hexdigest(b"".join(parts))
    assert advised == [(0, 1400), (300, 2800), (1700, 4200), (3100, 5600)]
