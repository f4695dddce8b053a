"""Tar members made here are those of WebDataset's own writer."""

from __future__ import annotations

import io
import json
import zlib

import numpy as np
import pytest
import webdataset

from pretrainkit.data.shards.format import decode_ids, end_of_archive, pack_samples

KINDS = ["json", "npy", "msgpack"]


def ids_of(number: int) -> np.ndarray:
    return np.arange(number % 400, dtype=np.int32) * 317 + number


@pytest.mark.parametrize("has_text", [True, False], ids=["text", "ids-only"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_has_the_bytes_of_webdatasets_writer(kind: str, has_text: bool) -> None:
    lines = np.concatenate([np.arange(60), np.arange(99_999_990, 100_000_010)]).astype(np.int64)
    ids = [ids_of(int(line)) for line in lines]
    texts = [("가나 text\n" * int(line % 130)).encode() for line in lines]
    wanted = io.BytesIO()
    with webdataset.TarWriter(wanted, mtime=0) as writer:
        for line, some, text in zip(lines, ids, texts, strict=True):
            sample = {"__key__": f"sample_7_{line:08d}", f"token_ids.{kind}": some if kind == "npy" else some.tolist()}
            writer.write({**sample, "text.txt": text} if has_text else sample)
    members, offsets, sizes, sums = pack_samples("sample_7_", lines, ids, texts if has_text else None, kind)
    tar = members + end_of_archive(len(members))
    assert tar == wanted.getvalue()
    for some, offset, size, checksum in zip(ids, offsets, sizes, sums, strict=True):
        content = tar[offset : offset + size]
        assert np.array_equal(decode_ids(content, kind), some) and zlib.crc32(content) == checksum


def test_ids_of_any_size_are_written_as_json_has_them() -> None:
    for largest in (999_999, 1_000_000, 2**31 - 1):
        ids = [np.array([0, 9, 10, 99_999, largest], np.int32), np.zeros(0, np.int32), np.array([7], np.int32)]
        members, offsets, sizes, _ = pack_samples("s_", np.arange(3), ids, None, "json")
        found = [members[offset : offset + size].decode() for offset, size in zip(offsets, sizes, strict=True)]
        assert found == [json.dumps(some.tolist()) for some in ids]


def test_the_first_pieces_of_a_tar_can_be_joined() -> None:
    whole, *_ = pack_samples("s_", np.arange(6), [ids_of(i) for i in range(6)], None, "json")
    halves = [
        pack_samples("s_", np.arange(i, i + 3), [ids_of(j) for j in range(i, i + 3)], None, "json") for i in (0, 3)
    ]
    assert b"".join(half[0] for half in halves) == whole
