"""Samples that are too large for their shard's table end the task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pretrainkit.data.shards.build import check_sizes
from pretrainkit.data.shards.inputs import ShardReader
from pretrainkit.data.shards.request import ShardRequest, make_shard_plan
from pretrainkit.data.shards.task import Piece
from pretrainkit.errors import DataError


@pytest.mark.parametrize("num_bytes", [2**31 - 1, 2**31])
def test_a_sample_whose_size_its_table_cannot_hold_is_named(
    num_bytes: int, tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("one\ntwo\n\nfour\n")
    plan = make_shard_plan(ShardRequest((str(source),), tmp_path / "out", str(tokenizer_folder)))
    reader = ShardReader(plan.sources, plan.items(0), plan.rules)
    (block,) = reader.blocks("sample_0_")
    piece = Piece(sizes=np.array([9, 9, num_bytes]), lines=np.array([0, 1, 3]))
    if num_bytes < 2**31:
        check_sizes(piece, block, reader)
        return
    with pytest.raises(DataError, match=r"in\.txt:4: the ids of this record take 2147483648 bytes") as refused:
        check_sizes(piece, block, reader)
    assert refused.value.needed == "at most 2147483647 bytes" and "--max_doc_bytes" in refused.value.action
