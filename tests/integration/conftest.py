"""Runs of tiny models, resolved by hand and trained in forked ranks; preprocessing that can be disturbed."""

from __future__ import annotations

import functools
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import preprocess_runs
import pytest
import ranks

import pretrainkit.engine.nemo  # noqa: F401  before NeMo itself
from pretrainkit.config.run_file import read_run, write_run
from pretrainkit.config.schema import (
    DataConfig,
    DatasetFacts,
    InitialWeights,
    LaunchConfig,
    OptimizerConfig,
    ParallelConfig,
    Recompute,
    ResolvedRun,
    RunConfig,
    TrackingConfig,
    TrainingConfig,
)
from pretrainkit.data.indexed.inspect import count_epoch
from pretrainkit.megatron.kernels import choose_for, installed_libraries
from pretrainkit.models.registry import read_shape
from pretrainkit.run.branch import link_checkpoint
from pretrainkit.run.json_lines import read_records

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def dataset_prefix(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, jsonl_file: Path) -> Path:
    """A .bin/.idx pair of real English, made by the project's own command."""
    prefix = tmp_path_factory.mktemp("dataset") / "reference"
    command = [sys.executable, "tools/preprocess_data.py", "--input", jsonl_file, "--output-prefix", prefix]
    command += ["--tokenizer-model", tokenizer_folder, "--append-eod"]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    return prefix.with_name(prefix.name + "_text_document")


@pytest.fixture(scope="session")
def write_tiny_run_in(dataset_prefix: Path) -> Callable[..., Path]:
    """Write the run.json of a tiny model into an experiment of a folder; keyword arguments change the run."""

    def write(
        home: Path,
        hf_folder: Path,
        experiment: str,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        context: int = 1,
        data_parallel: int = 1,
        sequence_parallel: bool = False,
        expert: int = 1,
        expert_tensor: int | None = None,
        max_steps: int = 4,
        initial_checkpoint: Path | None = None,
        hf_weights: Path | None = None,
        dataset: Path = dataset_prefix,
        num_workers: int = 0,
        wandb_project: str | None = None,
        recompute: Recompute = Recompute(),  # noqa: B008  it is frozen
        **training: Any,
    ) -> Path:
        world_size = tensor * pipeline * context * data_parallel
        settings = {"global_batch_size": 4, "save_interval": 4, "val_interval": 0, "precision": "fp32"} | training
        config = RunConfig(
            experiment=experiment,
            experiments_dir=str(home),
            hf_model_id=str(hf_folder),
            data=DataConfig(dataset_path=str(dataset), sequence_length=128, split="8,1,1", num_workers=num_workers),
            parallel=ParallelConfig(tensor, pipeline, context, sequence_parallel, expert, expert_tensor),
            optimizer=OptimizerConfig(lr=1e-3, lr_warmup_steps=2),
            training=TrainingConfig(max_steps=max_steps, **settings),
            tracking=TrackingConfig(wandb_project),
            launch=LaunchConfig(num_gpus=world_size, accelerator="cpu"),
        )
        run = ResolvedRun(
            config=config,
            model=read_shape(hf_folder),
            dataset=DatasetFacts((str(dataset),), (), 0, 0, None, "0" * 64),
            experiment_dir=str(home / experiment),
            hf_folder=str(hf_folder),
            initial_weights=initial_checkpoint
            and InitialWeights(
                str(initial_checkpoint), str(initial_checkpoint), None, str(hf_weights) if hf_weights else None
            ),
            accelerator="cpu",
            precision={"fp8": "bf16"}.get(settings["precision"], settings["precision"]),
            world_size=world_size,
            data_parallel_size=data_parallel,
            sequence_parallel=sequence_parallel,
            max_steps=max_steps,
            lr_warmup_steps=2,
            lr_decay_steps=20,
            min_lr=1e-4,
            samples_per_epoch=count_epoch([dataset], "8,1,1", 128, 1)[0].num_samples,
            padded_vocab_size=384,
            async_save=settings.get("async_save") == "on",
            recompute=recompute,
        )
        run_file = home / experiment / "run.json"
        run_file.parent.mkdir(parents=True, exist_ok=True)
        run = replace(run, kernels=choose_for(run, installed_libraries()))
        write_run(run_file, run)
        return run_file

    return write


@pytest.fixture(scope="session")
def train_tiny_in(write_tiny_run_in: Callable[..., Path]) -> Callable[..., list[dict[str, Any]]]:
    """Train a tiny model in a folder and get its metrics records; arguments as those of `write_tiny_run_in`."""

    def train(*arguments: Any, **settings: Any) -> list[dict[str, Any]]:
        return train_in_forked_ranks(write_tiny_run_in(*arguments, **settings))

    return train


@pytest.fixture
def write_tiny_run(tmp_path: Path, write_tiny_run_in: Callable[..., Path]) -> Callable[..., Path]:
    """`write_tiny_run_in` a folder of this test's own."""
    return functools.partial(write_tiny_run_in, tmp_path)


@pytest.fixture
def train_tiny(tmp_path: Path, train_tiny_in: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    """`train_tiny_in` a folder of this test's own."""
    return functools.partial(train_tiny_in, tmp_path)


@pytest.fixture(scope="session")
def train_request() -> Callable[..., list[dict[str, Any]]]:
    """Train what flags of pretrain.py ask for and get the metrics records.

    All of a start is the command's own, but that the ranks are forked instead of started by torchrun.
    """
    main = runpy.run_path(str(REPOSITORY / "pretraining" / "pretrain.py"))["main"]

    def train(words: list[str]) -> list[dict[str, Any]]:
        assert main([*words, "--dry_run"]) == 0
        home, experiment = (words[words.index(flag) + 1] for flag in ("--experiments_dir", "--experiment"))
        run_file = Path(home) / experiment / "run.json"
        if (dry := run_file.with_name("dry_run.json")).exists():  # of an experiment that has begun
            dry.replace(run_file)
        link_checkpoint(read_run(run_file))
        return train_in_forked_ranks(run_file)

    return train


def train_in_forked_ranks(run_file: Path) -> list[dict[str, Any]]:
    ranks.run_ranks(ranks.train_rank, read_run(run_file).world_size, run_file.parent, run_file=run_file)
    return read_records(run_file.parent / "metrics.jsonl")


@pytest.fixture
def start(tmp_path: Path, tokenizer_folder: Path) -> Iterator[preprocess_runs.Start]:
    """Start preprocess_data.py in an empty folder, in a process group of its own, with output `out`."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object, **options: Any) -> subprocess.Popen[str]:
        started.append(preprocess_runs.start(tmp_path, tokenizer_folder, *arguments, **options))
        return started[-1]

    yield run
    for process in started:
        preprocess_runs.end(process)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MB in a plain file, a gz one and a folder of small ones; some seconds of work."""
    folder = tmp_path_factory.mktemp("corpus")
    preprocess_runs.write_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def undisturbed(corpus: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the corpus's pair from one quiet run with one worker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = preprocess_runs.start(folder, tokenizer_folder, "--input", corpus, workers=1)
    code, errors = preprocess_runs.finish(process)
    assert code == 0, errors
    found = preprocess_runs.digest(folder)
    assert found is not None
    return found
