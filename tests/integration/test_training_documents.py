"""Documents that share a row are trained as if each had a row of its own."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
from hf_models import GROWING_ROPE

from pretrainkit.config.run_file import read_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.data.packed.format import PackedDataset

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
LENGTH = 128


@pytest.fixture(scope="module")
def bestfit(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, jsonl_file: Path) -> Path:
    """A set packed by bestfit, of short documents, so that most rows have several."""
    folder = tmp_path_factory.mktemp("bestfit")
    lines = [json.loads(line)["text"] for line in jsonl_file.read_text().splitlines()]
    words = " ".join(lines).split()
    texts = [" ".join(words[begin : begin + 5 + begin % 23]) for begin in range(0, 6000, 20)]
    (folder / "short.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["tools/pack_dataset.py", "--input", folder / "short.jsonl", "--output_dir", folder / "packed"]
    command += ["--packing", "bestfit", "--sequence_length", LENGTH, "--tokenizer_model", tokenizer_folder]
    subprocess.run([sys.executable, *map(str, command)], check=True, cwd=REPOSITORY)
    return folder / "packed"


def rows_with_several_documents(folder: Path, count: int) -> list[int]:
    data = PackedDataset(folder)
    return [number for number in range(len(data)) if len(data.document_lengths(number)) >= 2][:count]


GROWING = {**GROWING_ROPE, "original_max_position_embeddings": 16, "factor": 32.0}


@pytest.mark.parametrize(
    ("name", "changes", "tensor_parallel_size"),
    [("llama", {}, 1), ("llama", {}, 2), ("deepseek-v3", {}, 1), ("ministral3", {"rope_parameters": GROWING}, 1)],
    ids=["TP=1", "TP=2", "latent attention", "queries that grow"],
)
def test_losses_of_documents_in_a_row_are_those_of_the_documents_alone(
    make_model: Callable[..., Path],
    bestfit: Path,
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    tensor_parallel_size: int,
) -> None:
    import torch

    from pretrainkit.checkpoint.convert import convert
    from pretrainkit.megatron.dataset import row_sample

    hf_folder = make_model(name, vocab_size=320, **changes)
    convert(hf_folder, tmp_path / "nemo")
    data = PackedDataset(bestfit)
    samples = [
        row_sample(data.input_ids(number), data.document_lengths(number))
        for number in rows_with_several_documents(bestfit, 3)
    ]
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    torch.save(batch, tmp_path / "batch.pt")
    ranks.run_ranks(
        ranks.document_losses_rank,
        tensor_parallel_size,
        tmp_path,
        hf_folder=hf_folder,
        checkpoint=tmp_path / "nemo",
        batch_file=tmp_path / "batch.pt",
    )
    together, alone = torch.load(tmp_path / "losses.pt")
    assert int((batch["position_ids"] == 0).sum()) >= 6
    assert int(batch["position_ids"].max()) > 2 * GROWING["original_max_position_embeddings"]
    assert (together - alone).abs().max() <= 4e-6
    assert together.std() > 1e-3


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP=2 with SP": {"tensor": 2, "sequence_parallel": True},
    "PP=2": {"pipeline": 2},
    "two rows a microbatch": {"micro_batch_size": 2},
    "DP=2": {"data_parallel": 2},
    "CP=2, two rows a microbatch": {"context": 2, "micro_batch_size": 2},
    "CP=2, PP=2": {"context": 2, "pipeline": 2},
}
MASKED_LAYOUTS: dict[str, dict[str, Any]] = {
    "two samples a microbatch": {"micro_batch_size": 2},
    "DP=2, optimizer not distributed": {"data_parallel": 2, "distributed": False},
    "CP=2": {"context": 2},
    "PP=2, all samples a microbatch": {"pipeline": 2, "micro_batch_size": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_training_on_rows_is_the_same_in_every_layout(
    train_rows: Callable[..., list[float]], one: list[float], layout: dict[str, Any]
) -> None:
    assert len(set(one)) == 3
    assert train_rows(**layout) == pytest.approx(one, abs=1e-6)


def test_experts_and_latent_attention_within_documents_are_the_same_in_every_layout(
    train_rows: Callable[..., list[float]],
) -> None:
    """The losses of routers count as without documents, too."""
    settings = {"name": "deepseek-v3", "router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.1}
    one = train_rows(**settings)
    assert len(set(one)) == 3
    for layout in ({"context": 2}, {"tensor": 2, "sequence_parallel": True}):
        assert train_rows(**settings, **layout) == pytest.approx(one, abs=1e-5), layout


@pytest.mark.parametrize("layout", MASKED_LAYOUTS.values(), ids=MASKED_LAYOUTS.keys())
def test_training_with_masked_losses_is_the_same_in_every_layout(
    train_masked: Callable[..., list[float]], one_masked: list[float], layout: dict[str, Any]
) -> None:
    """Each token whose loss counts has the same weight, whatever else is in its microbatch."""
    assert train_masked(**layout) == pytest.approx(one_masked, abs=1e-6)


@pytest.fixture(scope="module")
def train(
    make_hf_llama: Callable[..., Path],
    make_model: Callable[..., Path],
    tokenizer_folder: Path,
    write_tiny_run_in: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., list[float]]:
    """The losses of a tiny model trained on a dataset."""
    from pretrainkit.checkpoint.convert import convert
    from pretrainkit.config.run_file import write_run
    from pretrainkit.run.json_lines import read_records

    @functools.cache
    def begun_with(name: str) -> tuple[Path, Path]:
        model, start = make_hf_llama(), tmp_path_factory.mktemp("start") / "nemo"
        if name != "llama":
            model = shutil.copytree(make_model(name, vocab_size=320), tmp_path_factory.mktemp(name) / "hf")
            shutil.copytree(tokenizer_folder, model, dirs_exist_ok=True)
        convert(model, start)
        return model, start

    def train(
        dataset: Path, change: Callable[[ResolvedRun], ResolvedRun], *, name: str = "llama", **layout: Any
    ) -> list[float]:
        model, start = begun_with(name)
        home = tmp_path_factory.mktemp("run")
        distributed = layout.pop("distributed", True)
        run_file = write_tiny_run_in(home, model, "run", max_steps=3, initial_checkpoint=start, **layout)
        run = change(read_run(run_file))
        config = replace(run.config, optimizer=replace(run.config.optimizer, distributed=distributed))
        facts = replace(run.dataset, prefixes=(str(dataset),))
        run = replace(run, config=config, dataset=facts)
        write_run(run_file, run)
        ranks.run_ranks(ranks.train_rank, run.world_size, run_file.parent, run_file=run_file)
        return [record["loss"] for record in read_records(run_file.parent / "metrics.jsonl") if "loss" in record]

    return train


@pytest.fixture(scope="module")
def train_rows(train: Callable[..., list[float]], bestfit: Path) -> Callable[..., list[float]]:
    """Training on rows."""
    return partial(train, bestfit, lambda run: replace(run, reset_attention_mask=True))


@pytest.fixture(scope="module")
def train_masked(
    train: Callable[..., list[float]], bestfit: Path, tokenizer_folder: Path
) -> Callable[..., list[float]]:
    """Training on the same documents without the losses of what follows them."""
    folder = bestfit.parent
    command = ["tools/preprocess_data.py", "--input", folder / "short.jsonl", "--output-prefix", folder / "short"]
    command += ["--tokenizer-model", tokenizer_folder, "--append-eod"]
    subprocess.run([sys.executable, *map(str, command)], check=True, cwd=REPOSITORY)

    def with_masks(run: ResolvedRun) -> ResolvedRun:
        return replace(run, config=replace(run.config, data=replace(run.config.data, eod_mask_loss=True)))

    return partial(train, folder / "short_text_document", with_masks)


@pytest.fixture(scope="module")
def one(train_rows: Callable[..., list[float]]) -> list[float]:
    """Those of one rank."""
    return train_rows()


@pytest.fixture(scope="module")
def one_masked(train_masked: Callable[..., list[float]]) -> list[float]:
    """Those of one rank."""
    return train_masked()
