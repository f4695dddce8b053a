"""The pool of workers: replies in order, errors where they are taken, and no hang when a process dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.tokens import encoder
from pretrainkit.data.tokens.encode_pool import EncodePool, WorkerDied
from pretrainkit.data.tokens.encoder import Encoder, EngineSpec, ReferenceEncoder
from pretrainkit.data.tokens.parity import EnginesDiffer, ParitySample
from pretrainkit.errors import DataError

LARGE = 8 << 20


@dataclass(frozen=True)
class CountTask:
    """Gives a text's ids and the worker's number and process; some texts are requests to fail or to be slow."""

    def open(self, encoder: Encoder, worker: int) -> Callable[[str], Any]:
        def encode(text: str) -> Any:
            if text == "bad":
                raise DataError("a bad record", where="in.jsonl:3", action="fix it")
            if text == "missing":
                raise FileNotFoundError(2, "No such file or directory", "in.jsonl")
            if text == "large":
                return os.getpid(), bytes(LARGE)
            time.sleep(len(text) % 5 / 200)
            return encoder.encode([text])[0], worker, os.getpid()

        return encode


def spec(folder: Path, name: str = "fastokens", *, verify_all: bool = False) -> EngineSpec:
    return EngineSpec(name, str(folder / "tokenizer.json"), special_tokens=False, verify_all=verify_all)


def started(folder: Path) -> Iterator[EncodePool]:
    with EncodePool(3) as pool:
        pool.load_reference(spec(folder))
        pool.load(spec(folder))
        pool.start(CountTask(), spec(folder), 3)
        yield pool


@pytest.fixture(scope="module")
def shared_pool(tokenizer_folder: Path) -> Iterator[EncodePool]:
    yield from started(tokenizer_folder)


@pytest.fixture
def pool(tokenizer_folder: Path) -> Iterator[EncodePool]:
    yield from started(tokenizer_folder)


def test_replies_are_in_the_order_of_the_items(shared_pool: EncodePool, tokenizer_folder: Path) -> None:
    reference = ReferenceEncoder(str(tokenizer_folder / "tokenizer.json"), special_tokens=False)
    texts = ["word " * (number % 11) + str(number) for number in range(60)]
    workers = set()
    for wanted, (text, (ids, worker, _)) in zip(texts, shared_pool.ordered(iter(texts)), strict=True):
        assert text == wanted
        assert np.array_equal(ids, reference.encode([text])[0])
        workers.add(worker)
    assert workers == {0, 1, 2}


def test_a_certain_worker_can_be_asked(shared_pool: EncodePool) -> None:
    assert [shared_pool.submit("abcd", worker).result()[1] for worker in (2, 0, 1, 2)] == [2, 0, 1, 2]


def test_what_a_worker_raises_is_raised_where_its_reply_is_taken(shared_pool: EncodePool) -> None:
    bad, missing, good = shared_pool.submit("bad"), shared_pool.submit("missing"), shared_pool.submit("a")
    with pytest.raises(DataError, match=r"in.jsonl:3: a bad record(.|\n)*fix it"):
        bad.result()
    with pytest.raises(FileNotFoundError) as raised:
        missing.result()
    assert raised.value.filename == "in.jsonl"
    assert len(good.result()) == 3


def test_ids_are_compared_with_those_of_tokenizers(pool: EncodePool, tokenizer_folder: Path) -> None:
    sample = ParitySample(("<|end|>",), [], [], RecordRules(("text",)))
    assert pool.start(CountTask(), spec(tokenizer_folder), 1, sample).result(timeout=60) == ""


def test_a_comparison_may_end_while_workers_are_forked(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = reduction.recv_handle

    def receive_late(connection: Connection) -> int:
        time.sleep(0.5)
        return receive(connection)

    sample = ParitySample(("<|end|>",), [], [], RecordRules(("text",)))
    with EncodePool(3) as pool:
        pool.load_reference(spec(tokenizer_folder))
        pool.load(spec(tokenizer_folder))
        monkeypatch.setattr(reduction, "recv_handle", receive_late)
        assert pool.start(CountTask(), spec(tokenizer_folder), 3, sample).result(timeout=60) == ""
        assert pool.submit("abcd", 2).result(timeout=60)[1] == 2


def test_workers_are_replaced_by_those_of_another_engine(pool: EncodePool, tokenizer_folder: Path) -> None:
    ids, _, before = pool.submit("some text").result()
    pool.start(CountTask(), spec(tokenizer_folder, "tokenizers"), 2)
    assert len(pool) == 2
    again, _, after = pool.submit("some text").result()
    assert np.array_equal(ids, again)
    assert before != after
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


def test_a_tokenizer_that_can_not_be_loaded_is_told(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with EncodePool(1) as pool:
        with pytest.raises(EnginesDiffer, match="fastokens does not load this tokenizer"):
            pool.start(CountTask(), spec(tmp_path), 1)
        with pytest.raises(DataError, match=r"tokenizers does not load this tokenizer(.|\n)*fix tokenizer.json"):
            pool.start(CountTask(), spec(tmp_path, "tokenizers"), 1)
        pool.start(CountTask(), spec(tokenizer_folder, verify_all=True), 1)
        assert pool.submit("a").result()[1] == 0


def test_a_worker_killed_while_it_sends_is_named_and_hangs_nobody(pool: EncodePool) -> None:
    victim = pool.submit("", 1).result()[2]
    for worker in (0, 1, 2):
        assert pool.submit("large", worker).result()[1] == bytes(LARGE)
    os.kill(victim, signal.SIGSTOP)
    stuck = pool.submit("large", 1)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"worker 1 \(process {victim}\) was killed by signal 9"):
        stuck.result(timeout=10)
    assert pool.submit("large", 0).result(timeout=10)[1] == bytes(LARGE)


def test_a_killed_fork_server_takes_its_workers_along(pool: EncodePool) -> None:
    worker = pool.submit("").result()[2]
    (server,) = [process for process in children(os.getpid()) if worker in children(process)]
    os.kill(server, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"that loads the tokenizer \(process {server}\) was killed by signal 9"):
        for _ in range(100):
            pool.submit("abcd").result(timeout=10)


def children(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


def test_a_thread_that_the_kernel_removes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine: fastokens would not be used, since it would seem to have started a thread."""
    counts = [1, 2, 2, 2, 1]
    monkeypatch.setattr(encoder, "num_threads", lambda: counts.pop(0))

    class Slow:
        def encode(self, texts: list[str]) -> None:
            time.sleep(1.05)

    encoder._make_tables(Slow())  # type: ignore[arg-type]
    assert not counts
