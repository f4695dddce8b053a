"""Batches out of token shards: every token once, the same batches for any workers, equal steps for all ranks."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset

from pretrainkit.data.shards.build import make_shards
from pretrainkit.data.shards.format import OLD_SAMPLE, SAMPLE
from pretrainkit.data.shards.loader import TokenBatches, make_loader
from pretrainkit.data.shards.request import ShardRequest, make_shard_plan
from pretrainkit.data.shards.shard_set import open_shards
from pretrainkit.errors import DataError, RequestError

COUNTS = (7, 7, 0, 7, 7, 2)
"""Records of each file: uneven, one empty."""


@pytest.fixture(scope="module")
def make_set(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, jsonl_file: Path) -> Callable[..., Path]:
    """Shards of thirty documents in six files."""

    def make(ids_format: str = "json") -> Path:
        folder = tmp_path_factory.mktemp("shards")
        lines = jsonl_file.read_text().splitlines(keepends=True)
        for number, count in enumerate(COUNTS):
            (folder / f"{number}.jsonl").write_text("".join(lines[:count]))
            del lines[:count]
        request = ShardRequest(
            (str(folder),), folder / "out", str(tokenizer_folder), ids_format=ids_format, verify_tokens="off"
        )
        plan = make_shard_plan(request)
        make_shards(plan, list(range(plan.num_shards)))
        return folder / "out"

    return make


@pytest.fixture(scope="module")
def shards(make_set: Callable[..., Path]) -> Path:
    return make_set()


def samples(folder: Path) -> list[list[int]]:
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    return [sample["token_ids.json"] for sample in webdataset.WebDataset(urls, shardshuffle=False).decode()]


def batches(folder: Path | str, **settings: Any) -> list[dict[str, torch.Tensor]]:
    settings = {"sequence_length": 64, "batch_size": 3, "num_workers": 0, "rank": 0, "world_size": 1} | settings
    return list(make_loader(folder, **settings))


def same(some: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a[name], b[name]) for a, b in zip(some, others, strict=True) for name in a
    )


def test_without_shuffling_rows_are_the_stream_of_tokens(shards: Path) -> None:
    rows = torch.cat([batch["input_ids"] for batch in batches(shards, shuffle_buffer=0, shuffle_shards=False, lanes=1)])
    stream = np.concatenate([np.array(ids) for ids in samples(shards)])
    assert np.array_equal(rows.flatten().numpy(), stream[: rows.numel()])
    assert len(stream) - rows.numel() < 3 * 64


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("buffer", [0, 4, 1000])
def test_every_token_comes_once_and_all_ranks_have_equal_steps(shards: Path, world_size: int, buffer: int) -> None:
    of_ranks = [batches(shards, rank=rank, world_size=world_size, shuffle_buffer=buffer) for rank in range(world_size)]
    assert len({len(of_rank) for of_rank in of_ranks}) == 1
    found = Counter(row.numpy().tobytes() for of_rank in of_ranks for batch in of_rank for row in batch["input_ids"])
    assert max(found.values()) <= max(Counter(map(tuple, samples(shards))).values()) + 1
    tokens = Counter(torch.cat([batch["input_ids"].flatten() for each in of_ranks for batch in each]).tolist())
    wanted = Counter(token for ids in samples(shards) for token in ids)
    assert tokens <= wanted
    assert sum(wanted.values()) - sum(tokens.values()) < 64 * 3 * world_size + 64


def test_rows_of_an_epoch_are_a_partition_of_its_stream(shards: Path) -> None:
    dataset = TokenBatches(open_shards(shards), sequence_length=64, batch_size=2, shuffle_buffer=5, lanes=3)
    in_order = [dataset.row(row) for row in range(len(dataset) * 2)]
    dealt = [row.numpy().astype(np.int32) for number in range(len(dataset)) for row in dataset[number]["input_ids"]]
    assert Counter(row.tobytes() for row in in_order) == Counter(row.tobytes() for row in dealt)


def test_padding_is_masked_and_long_samples_become_several_rows(shards: Path) -> None:
    got = batches(shards, packing="pad", sequence_length=300, pad_to_multiple=16, batch_size=2, shuffle_buffer=3)
    found = Counter()
    for batch in got:
        assert batch["input_ids"].shape[1] % 16 == 0 or batch["input_ids"].shape[1] == 300
        mask = batch["attention_mask"].bool()
        assert torch.equal(batch["labels"][mask], batch["input_ids"][mask])
        assert (batch["labels"][~mask] == -100).all()
        rows = zip(batch["input_ids"], mask, strict=True)
        found.update(tuple(ids[is_real].tolist()) for ids, is_real in rows)
    pieces = Counter(tuple(ids[i : i + 300]) for ids in samples(shards) for i in range(0, len(ids), 300))
    assert found <= pieces and pieces.total() - found.total() < 2


@pytest.mark.parametrize("kind", ["npy", "msgpack"])
def test_the_form_of_the_ids_makes_no_difference(make_set: Callable[..., Path], shards: Path, kind: str) -> None:
    assert same(batches(make_set(kind)), batches(shards))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_batches_also_after_a_resume(shards: Path, workers: int) -> None:
    whole = batches(shards) + batches_of_epoch(shards, 1)
    loader = make_loader(shards, sequence_length=64, batch_size=3, num_workers=2, rank=0, world_size=1)
    before = list(islice(loader, 5))
    state = json.loads(json.dumps(loader.state_dict()))
    again = make_loader(shards, sequence_length=64, batch_size=3, num_workers=workers, rank=0, world_size=1)
    again.load_state_dict(state)
    rest = list(again) + list(again)
    assert same(before + rest, whole)


def batches_of_epoch(folder: Path, epoch: int) -> list[dict[str, torch.Tensor]]:
    loader = make_loader(folder, sequence_length=64, batch_size=3, num_workers=0, rank=0, world_size=1)
    loader.epoch = epoch
    return list(loader)


def test_epochs_differ_and_a_state_of_other_settings_is_refused(shards: Path) -> None:
    assert not same(batches(shards), batches_of_epoch(shards, 1))
    loader = make_loader(shards, sequence_length=64, batch_size=3, num_workers=0, rank=0, world_size=1)
    other = make_loader(shards, sequence_length=64, batch_size=2, num_workers=0, rank=0, world_size=1)
    with pytest.raises(RequestError, match="batch_size 2 then, 3 now"):
        loader.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    "url", ["pipe:cat {folder}/shard-{{00000..00005}}.tar", "{folder}/shard-*.tar"], ids=["stream", "paths"]
)
def test_urls_give_the_batches_of_the_folder(shards: Path, url: str) -> None:
    settings: dict[str, Any] = {"shuffle_buffer": 4, "lanes": 2, "batch_size": 7}
    if "*" in url:  # the empty shard has no tar; the others' batches are the same
        assert same(batches(url.format(folder=shards), **settings), batches(shards, **settings))
    else:
        assert same(batches(url.format(folder=shards), num_workers=2, **settings), batches(shards, **settings))


def test_fewer_shards_than_ranks_are_refused_when_whole_shards_are_asked_for(shards: Path) -> None:
    with pytest.raises(RequestError, match="5 shards with samples for 6 ranks"):
        batches(shards, split="shards", rank=0, world_size=6)
    of_ranks = [batches(shards, split="shards", rank=rank, world_size=2) for rank in range(2)]
    assert len(of_ranks[0]) == len(of_ranks[1])


def test_damaged_and_missing_shards_are_refused(shards: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(shards, tmp_path / "copy")
    (copy / "shard-00001.json").unlink()
    with pytest.raises(RequestError, match="1 of 6 shards are missing: shard-00001"):
        open_shards(copy)
    shutil.copy(shards / "shard-00001.json", copy)
    with (copy / "shard-00003.tar").open("ab") as file:
        file.truncate(10_240)
    with pytest.raises(RequestError, match="10240 bytes, its record says"):
        open_shards(copy)
    with pytest.raises(RequestError, match="no finished token shard"):
        open_shards(tmp_path)


def test_a_changed_digit_ends_the_epoch_with_its_place(shards: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(shards, tmp_path / "copy")
    table = np.fromfile(copy / "shard-00003.samples", SAMPLE)
    with (copy / "shard-00003.tar").open("r+b") as file:
        file.seek(int(table[2]["offset"]) + 1)
        digit = file.read(1)
        file.seek(-1, 1)
        file.write(b"1" if digit != b"1" else b"2")
    with pytest.raises(DataError, match=r"shard-00003\.tar: sample 2 holds other bytes than were written"):
        batches(copy)


def test_sets_of_older_versions_are_read(shards: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(shards, tmp_path / "copy")
    for path in copy.glob("*.samples"):
        np.fromfile(path, SAMPLE)[list(OLD_SAMPLE.names or ())].astype(OLD_SAMPLE).tofile(path)
    for path in copy.glob("*.json"):
        record = json.loads(path.read_text())
        del record["has_sample_checksums"]
        path.write_text(json.dumps(record))
    assert same(batches(copy), batches(shards))
