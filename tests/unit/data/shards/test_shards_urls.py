"""Token shards behind URLs: opened, read, and copied for training."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrainkit.data.shards import mirror
from pretrainkit.data.shards.build import make_shards
from pretrainkit.data.shards.loader import make_loader
from pretrainkit.data.shards.request import ShardRequest, make_shard_plan
from pretrainkit.data.shards.shard_set import ShardDocuments, open_shards
from pretrainkit.data.shards.urls import is_url, names_shards
from pretrainkit.errors import DataError, RequestError

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="WebDataset opens http: by curl")
NUM_SHARDS = 3


@pytest.fixture
def folder(tmp_path: Path, tokenizer_folder: Path, jsonl_file: Path) -> Path:
    """Three shards of ten documents each."""
    (tmp_path / "texts").mkdir()
    lines = jsonl_file.read_text().splitlines(keepends=True)
    for number in range(NUM_SHARDS):
        (tmp_path / "texts" / f"{number}.jsonl").write_text("".join(lines[10 * number : 10 * number + 10]))
    request = ShardRequest((str(tmp_path / "texts"),), tmp_path / "served", str(tokenizer_folder), verify_tokens="off")
    plan = make_shard_plan(request)
    make_shards(plan, list(range(plan.num_shards)))
    return tmp_path / "served"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and notes what was asked for."""

    asked: list[str]

    def log_message(self, *arguments: object) -> None:
        self.asked.append(self.path)


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A URL of all shards, and what was asked for so far."""
    Handler.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/shard-{{00000..0000{NUM_SHARDS - 1}}}.tar", Handler.asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "url", "shards"),
    [
        ("https://host/shard-00000.tar", True, True),
        ("pipe:aws s3 cp s3://bucket/shard-{00000..00003}.tar -", True, True),
        ("file:/data/shard-00000.tar", False, True),
        ("/data/shard-*.tar", False, True),
        ("/data/shards", False, False),
        ("C", False, False),
    ],
)
def test_names_are_told_apart(name: str, url: bool, shards: bool) -> None:
    assert (is_url(name), names_shards(name)) == (url, shards)


@pytest.mark.parametrize("scheme", ["http", "pipe", "file", "pattern"])
def test_shards_behind_any_url_are_those_of_the_folder(
    scheme: str, folder: Path, served: tuple[str, list[str]]
) -> None:
    numbers = f"{{00000..0000{NUM_SHARDS - 1}}}"
    name = {
        "http": served[0],
        "pipe": f"pipe:cat {folder}/shard-{numbers}.tar",
        "file": f"file:{folder}/shard-{numbers}.tar",
        "pattern": f"{folder}/shard-*.tar",
    }[scheme]
    assert open_shards(name).data_hash == open_shards(folder).data_hash
    settings = {"sequence_length": 64, "batch_size": 2, "num_workers": 0, "rank": 0, "world_size": 1}
    ours, theirs = make_loader(name, **settings), make_loader(folder, **settings)  # type: ignore[arg-type]
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(ours, theirs, strict=True))


def test_shards_are_copied_once_and_read_as_documents(
    folder: Path, served: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, asked = served
    path = mirror.local_shards(url, tmp_path / "cache")
    documents, wanted = ShardDocuments(path), ShardDocuments(folder)
    assert documents.data_hash == wanted.data_hash
    assert all(np.array_equal(documents.get(i), wanted.get(i)) for i in range(len(wanted)))
    asked.clear()
    assert mirror.local_shards(url, tmp_path / "cache") == path
    assert asked and not any(name.endswith(".tar") for name in asked)
    assert mirror.local_shards(str(folder), tmp_path / "cache") == str(folder)


def test_a_cut_copy_goes_on_where_it_stopped(folder: Path, served: tuple[str, list[str]], tmp_path: Path) -> None:
    url, asked = served
    whole = (folder / "shard-00001.tar").read_bytes()
    (folder / "shard-00001.tar").write_bytes(whole[:-5000])
    with pytest.raises(DataError, match="not those of its record"):
        mirror.local_shards(url, tmp_path / "cache")
    (copied,) = (tmp_path / "cache").glob("*/")
    assert not (copied / "shard-00001.json").exists() and not list(copied.glob("*.tmp-*"))
    (folder / "shard-00001.tar").write_bytes(whole)
    (copied / "shard-00001.tar.tmp-host-1").write_bytes(whole[:-5000])  # as a kill leaves it
    asked.clear()
    mirror.local_shards(url, tmp_path / "cache")
    assert [name for name in asked if name.endswith(".tar")].count("/shard-00001.tar") == 1
    assert len(list(copied.glob("*.tar"))) == NUM_SHARDS and not list(copied.glob("*.tmp-*"))


def test_a_shard_without_its_record_is_refused(folder: Path, served: tuple[str, list[str]]) -> None:
    (folder / "shard-00002.json").unlink()
    with pytest.raises(RequestError, match="can't be read"):
        open_shards(served[0])


def test_a_full_disk_is_told_before_copying(
    served: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="free"):
        mirror.local_shards(served[0], tmp_path / "cache")
