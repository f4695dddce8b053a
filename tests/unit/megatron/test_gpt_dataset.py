from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron.core.datasets.utils import Split

from pretrainkit.megatron import patches
from pretrainkit.megatron.blend import shares_drawn
from pretrainkit.megatron.dataset import EpochDataset, documents_of_samples

EOD = 2
SEQUENCE_LENGTH = 16


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Forty documents of 5 to 44 different tokens, each with EOD at its end."""
    prefix = str(tmp_path / "documents")
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.uint16)
    for number in range(40):
        builder.add_document(np.append(np.arange(5 + number) + 100 * number + 3, EOD), [6 + number])
    builder.finalize(get_idx_path(prefix))
    return prefix


def dataset(
    prefix: str,
    tmp_path: Path,
    num_samples: int | None,
    *,
    seed: int = 7,
    eod: int = EOD,
    eod_mask_loss: bool = False,
) -> EpochDataset:
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=SEQUENCE_LENGTH,
        # The tokenizer of a model that pads with its EOD.
        tokenizer=SimpleNamespace(eod=eod, pad=eod, vocab_size=1000, unique_identifiers={"name": "test"}),  # type: ignore[arg-type]
        path_to_cache=str(tmp_path / "cache"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=eod_mask_loss,
        create_attention_mask=False,
        split="1,0,0",
    )
    documents = np.arange(40, dtype=np.int32)
    return EpochDataset(IndexedDataset(prefix), prefix, documents, num_samples, Split.train, config)


def tokens(data: Any, indices: range) -> list[tuple[int, ...]]:
    return [tuple(data[index]["tokens"].tolist()) for index in indices]


def test_a_longer_run_begins_with_the_samples_of_a_shorter_one(prefix: str, tmp_path: Path) -> None:
    one_epoch = dataset(prefix, tmp_path, None)
    samples = len(one_epoch)
    lengths = (samples // 2, samples, samples + 1, 3 * samples + 5)
    orders = [tokens(dataset(prefix, tmp_path, length), range(length)) for length in lengths]
    for shorter, longer in itertools.pairwise(orders):
        assert longer[: len(shorter)] == shorter


def test_every_epoch_holds_every_sample_once_in_an_order_of_its_own(prefix: str, tmp_path: Path) -> None:
    data = dataset(prefix, tmp_path, 10**6)
    samples = len(dataset(prefix, tmp_path, None))
    epochs = [tokens(data, range(epoch * samples, (epoch + 1) * samples)) for epoch in range(3)]
    assert samples > 20
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_order_does_not_depend_on_what_was_read_before(prefix: str, tmp_path: Path) -> None:
    samples = len(dataset(prefix, tmp_path, None))
    forward, backward = dataset(prefix, tmp_path, 4 * samples), dataset(prefix, tmp_path, 4 * samples)
    indices = range(4 * samples)
    assert tokens(forward, indices) == tokens(backward, indices[::-1])[::-1]


def test_another_seed_gives_another_order(prefix: str, tmp_path: Path) -> None:
    first, second = (dataset(prefix, tmp_path, None, seed=seed) for seed in (1, 2))
    assert tokens(first, range(len(first))) != tokens(second, range(len(second)))


def test_ends_of_documents_are_learnt_where_padding_is_eod(prefix: str, tmp_path: Path) -> None:
    data = dataset(prefix, tmp_path, None)
    samples = [data[index] for index in range(len(data))]
    assert sum(int((sample["labels"] == EOD).sum()) for sample in samples) > 30
    assert all(bool(sample["loss_mask"].all()) for sample in samples)
    assert all(0 not in sample["tokens"] for sample in samples)


@pytest.mark.parametrize("eod", [EOD, 60000], ids=["the data's", "another"])
def test_what_follows_a_documents_end_is_left_out_whatever_the_tokenizers_eod_is(
    prefix: str, tmp_path: Path, eod: int
) -> None:
    data = dataset(prefix, tmp_path, None, eod=eod, eod_mask_loss=True)
    samples = [data[index] for index in range(len(data))]
    assert sum(int((sample["loss_mask"] == 0).sum()) for sample in samples) > 30
    for sample in samples:
        assert ((sample["loss_mask"] == 0) == (sample["tokens"] == EOD)).all()


def test_a_sample_knows_its_documents(prefix: str, tmp_path: Path) -> None:
    data = dataset(prefix, tmp_path, None)
    documents = documents_of_samples(data, range(len(data)))[prefix]
    assert len(documents) > 35 and set(documents) <= set(range(40))  # an epoch leaves out its incomplete last sample
    stored = IndexedDataset(prefix)
    for sample in range(len(data)):
        documents = data.sample_documents(sample)
        text = np.concatenate([stored[document] for document in documents]).tolist()
        tokens = data[sample]["tokens"].tolist()
        assert any(text[begin : begin + len(tokens)] == tokens for begin in range(len(text)))


def test_jobs_that_build_one_index_at_once_read_the_same(prefix: str, tmp_path: Path) -> None:
    """PRETRAINKIT_RACES=20 in the environment repeats it."""
    fork = multiprocessing.get_context("fork")
    right = tokens(dataset(prefix, tmp_path / "alone", None), range(20))

    def job(folder: Path, barrier: Any, delay_s: float, answers: Any) -> None:
        save = np.save

        def slowly(file: Any, *args: Any, **kwargs: Any) -> None:
            time.sleep(delay_s)
            save(file, *args, **kwargs)

        np.save = slowly
        patches.apply(patches.INDEX_FILES)
        barrier.wait()
        try:
            answers.put(tokens(dataset(prefix, folder, None), range(20)))
        except Exception as error:
            answers.put(repr(error))

    for race in range(int(os.environ.get("PRETRAINKIT_RACES", "2"))):
        barrier, answers = fork.Barrier(3), fork.Queue()
        jobs = [fork.Process(target=job, args=(tmp_path / f"{race}", barrier, d, answers)) for d in (0, 0.05, 0.1)]
        for process in jobs:
            process.start()
        assert [answers.get(timeout=60) for _ in jobs] == [right] * len(jobs)
        for process in jobs:
            process.join()
        assert tokens(dataset(prefix, tmp_path / f"{race}", None), range(20)) == right
        assert not [path for path in (tmp_path / f"{race}").rglob("*") if "tmp" in path.name]


def test_a_mixture_gives_each_part_its_share_of_the_samples(prefix: str, tmp_path: Path) -> None:
    parts, shares = [dataset(prefix, tmp_path, 1000, seed=seed) for seed in range(3)], [0.5, 0.3, 0.2]
    config = parts[0].config
    config.path_to_cache = None
    mixture = BlendedDataset(parts, shares, 1000, config)
    counts = np.bincount(mixture.dataset_index, minlength=3)
    assert np.abs(counts - np.array([500, 300, 200])).max() <= 1
    assert shares_drawn(mixture, range(1000)) == (counts / 1000).tolist()
    assert sum(shares_drawn(mixture, range(400, 1000))) == pytest.approx(1)
    for part in range(3):
        own = mixture.dataset_sample_index[mixture.dataset_index == part]
        assert own.tolist() == list(range(len(own)))
