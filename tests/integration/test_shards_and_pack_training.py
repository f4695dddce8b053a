"""The same documents as a pair, as token shards and as a packed dataset: one stream, one training."""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pretrainkit.data.dataset import read_dataset
from pretrainkit.data.documents import documents_kind
from pretrainkit.data.indexed.format import IndexedDataset
from pretrainkit.errors import RequestError

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
PACKED_LENGTH = 3


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, jsonl_file: Path) -> dict[str, Path]:
    """A folder of shards and a packed dataset of the documents of the pair of `dataset_prefix`."""
    folder = tmp_path_factory.mktemp("forms")
    shards = ["tools/make_shards.py", "--input_dir", jsonl_file, "--output_dir", folder / "shards", "--all"]
    shards += ["--num_shards", 1, "--model_id", tokenizer_folder, "--append_eod"]
    # Short sequences, so that next to nothing is dropped at the end.
    packed = ["tools/pack_dataset.py", "--input", jsonl_file, "--output_dir", folder / "packed", "--num_proc", 1]
    packed += ["--sequence_length", PACKED_LENGTH, "--tokenizer_model", tokenizer_folder]
    for command in (shards, packed):
        subprocess.run([sys.executable, *map(str, command)], check=True, cwd=REPOSITORY)
    return {"shards": folder / "shards", "packed": folder / "packed"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, jsonl_file: Path) -> Path:
    """The documents in rows of 128 tokens, as many as fit."""
    folder = tmp_path_factory.mktemp("bestfit") / "rows"
    words = ["tools/pack_dataset.py", "--input", jsonl_file, "--output_dir", folder, "--packing", "bestfit"]
    words += ["--sequence_length", 128, "--tokenizer_model", tokenizer_folder]
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=REPOSITORY)
    return folder


@pytest.mark.parametrize("form", ["shards", "packed"])
def test_documents_are_those_of_the_pair(form: str, forms: dict[str, Path], dataset_prefix: Path) -> None:
    kind = documents_kind(forms[form])
    assert kind is not None
    pair, documents = IndexedDataset(dataset_prefix), kind(forms[form])
    assert len(documents) == pair.num_documents
    dropped = pair.num_tokens - int(documents.sequence_lengths.sum())
    assert dropped == (pair.num_tokens % PACKED_LENGTH if form == "packed" else 0)
    begins = np.cumsum(pair.sequence_lengths) - pair.sequence_lengths
    for number in (0, 3, len(documents) - 1, 3):
        begin, length = int(begins[number]), int(documents.sequence_lengths[number])
        assert np.array_equal(documents.get(number), pair.tokens[begin : begin + length])
        assert np.array_equal(documents.get(number, offset=2, length=5), pair.tokens[begin + 2 : begin + 7])


@pytest.mark.parametrize("form", ["shards", "packed"])
def test_a_run_knows_of_them_what_it_knows_of_a_pair(form: str, forms: dict[str, Path], dataset_prefix: Path) -> None:
    of_pair, found = read_dataset(str(dataset_prefix), "8,2,0"), read_dataset(str(forms[form]), "8,2,0")
    assert found.facts.num_documents == of_pair.facts.num_documents
    assert found.facts.max_token_id == of_pair.facts.max_token_id
    assert found.tokenizers == of_pair.tokenizers and found.facts.max_token_id is not None
    assert found.split_tokens and of_pair.split_tokens
    assert found.split_tokens[0][0] == of_pair.split_tokens[0][0]
    assert found.facts.data_hash != of_pair.facts.data_hash


@pytest.fixture(scope="module")
def model(make_hf_llama: Callable[..., Path]) -> Path:
    return make_hf_llama()


@pytest.fixture(scope="module")
def losses(model: Path, train_request: Callable[..., list[dict[str, Any]]]) -> Callable[..., list[tuple[int, float]]]:
    """Train on data of any form, or go on, and get the steps with their losses."""

    def train(home: Path, experiment: str, dataset: Path | str, max_steps: int) -> list[tuple[int, float]]:
        words = f"--hf_model_id {model} --dataset_path {dataset} --experiment {experiment} --experiments_dir {home}"
        words += " --accelerator cpu -G 1 -g 4 --sequence_length 128 --split 8,2,0 --val_interval 0 --lr_decay_steps 4"
        records = train_request([*words.split(), "--max_steps", str(max_steps)])
        return [(each["step"], each["loss"]) for each in records if "loss" in each and "learning_rate" in each]

    return train


@pytest.fixture(scope="module")
def of_shards(
    losses: Callable[..., list[tuple[int, float]]], forms: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[int, float]]:
    """Four steps on the shards, stopped after two."""
    home = tmp_path_factory.mktemp("shards")
    losses(home, "shards", forms["shards"], 2)
    return losses(home, "shards", forms["shards"], 4)


@pytest.mark.usefixtures("megatron")
def test_samples_of_a_run_are_those_of_the_pair(forms: dict[str, Path], dataset_prefix: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    from pretrainkit.megatron.dataset import EpochDataset

    def samples(path: Path) -> list[list[int]]:
        config = GPTDatasetConfig(
            random_seed=7,
            sequence_length=64,
            tokenizer=SimpleNamespace(eod=1, pad=1, vocab_size=320, unique_identifiers={"name": "test"}),  # type: ignore[arg-type]
            path_to_cache=str(tmp_path / path.name),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            split="8,2,0",
        )
        documents = EpochDataset.build_low_level_dataset(str(path), config)
        training = np.arange(32, dtype=np.int32)  # without the last document, which packing may cut
        dataset = EpochDataset(documents, str(path), training, None, Split.train, config)
        return [dataset[index]["tokens"].tolist() for index in range(len(dataset))]

    wanted = samples(dataset_prefix)
    assert len(wanted) > 100
    for folder in forms.values():
        assert samples(folder) == wanted


def test_training_from_each_form_resumes_in_the_middle(
    of_shards: list[tuple[int, float]],
    losses: Callable[..., list[tuple[int, float]]],
    forms: dict[str, Path],
    tmp_path: Path,
) -> None:
    losses(tmp_path, "packed", forms["packed"], 2)
    assert losses(tmp_path, "packed", forms["packed"], 4) == of_shards
    assert [step for step, _ in of_shards] == [1, 2, 3, 4]


def test_a_mixture_of_forms_tells_what_it_draws(
    forms: dict[str, Path],
    dataset_prefix: Path,
    model: Path,
    train_request: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    words = f"--hf_model_id {model} --experiment mixture --experiments_dir {tmp_path}".split()
    words += ["--accelerator", "cpu", "-G", "1", "-g", "4", "--max_steps", "3"]
    words += ["--dataset_path", f"3 {dataset_prefix} 1 {forms['shards']}", "--sequence_length", "128"]
    records = train_request([*words, "--split", "8,2,0", "--val_interval", "0"])
    (mixture,) = [record for record in records if record.get("event") == "mixture"]
    assert mixture["num_samples"] == 12
    assert list(mixture["shares"].values()) == [{"drawn": 0.75, "asked": 0.75}, {"drawn": 0.25, "asked": 0.25}]
    assert next(iter(mixture["shares"])) == str(dataset_prefix)


def test_shards_behind_a_url_train_and_resume_as_those_of_the_folder(
    of_shards: list[tuple[int, float]],
    losses: Callable[..., list[tuple[int, float]]],
    forms: dict[str, Path],
    tmp_path: Path,
) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(forms["shards"]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/shard-{{00000..00000}}.tar"
        losses(tmp_path, "url", url, 2)
        found = losses(tmp_path, "url", url, 4)
        server.shutdown()
    assert found == of_shards
    assert len(list((tmp_path / ".shard_cache").glob("*/shard-00000.tar"))) == 1


def test_rows_of_bestfit_train_and_resume_in_the_middle(
    rows: Path, losses: Callable[..., list[tuple[int, float]]], tmp_path: Path
) -> None:
    whole = losses(tmp_path, "whole", rows, 4)
    losses(tmp_path, "resumed", rows, 2)
    assert losses(tmp_path, "resumed", rows, 4) == whole
    assert [step for step, _ in whole] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--sequence_length 64", "rows of 128"),
        ("--sequence_length 128 --layer_spec te", "Transformer Engine's layers"),
    ],
    ids=["another length", "transformer engine"],
)
def test_what_rows_can_not_do_is_refused(
    flags: str,
    told: str,
    rows: Path,
    model: Path,
    tmp_path: Path,
) -> None:
    words = [*f"--hf_model_id {model} --dataset_path {rows} --accelerator cpu -g 4".split()]
    words += ["--split", "8,2,0", "--experiments_dir", tmp_path, "--dry_run", *flags.split()]
    words += ["-G", 1]
    done = subprocess.run(
        [sys.executable, "pretraining/pretrain.py", *map(str, words)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2 and told in done.stderr, done.stderr


def test_an_incomplete_set_is_refused_before_the_run(forms: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "shard-00000.tar").write_bytes(b"")
    with pytest.raises(RequestError, match="no finished token shard"):
        read_dataset(str(tmp_path / "shards"), "1,0,0")


def test_pairs_beside_shards_are_refused(forms: dict[str, Path], dataset_prefix: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(forms["shards"], tmp_path / "both")
    for suffix in (".bin", ".idx", ".manifest.json"):
        shutil.copy(f"{dataset_prefix}{suffix}", folder / f"shard-1_text_document{suffix}")
    with pytest.raises(RequestError, match="both"):
        read_dataset(str(folder), "1,0,0")
    for path in folder.glob("shard-0*"):
        path.unlink()
    assert read_dataset(str(folder), "1,0,0").facts.prefixes == (str(folder / "shard-1_text_document"),)
