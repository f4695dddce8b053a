"""Checkpoints move between Transformer Engine's layers and ours, with optimizer state, in the middle of a run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import bench_training
import pytest
import torch

from pretrainkit.config.run_file import write_run

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="needs Transformer Engine"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    bench_training.write_inputs(folder, _arguments(4))
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    return folder


@pytest.fixture(scope="module")
def unbroken(inputs: Path) -> list[float]:
    return _train(inputs, "unbroken", "fused", steps=4)


@pytest.mark.parametrize(("first", "second"), [("fused", "te"), ("te", "fused")], ids=["torch to te", "te to torch"])
def test_a_run_goes_on_with_the_other_layers(inputs: Path, unbroken: list[float], first: str, second: str) -> None:
    _train(inputs, f"{first}_{second}", first, steps=2)
    losses = _train(inputs, f"{first}_{second}", second, steps=4)
    assert losses == pytest.approx(unbroken, abs=2e-3)
    assert losses[3] < losses[0] - 0.1  # it learns; a lost optimizer state would show against `unbroken`


def _arguments(steps: int) -> argparse.Namespace:
    words = f"--layers 2 --steps {steps} --sequence_length 512 --micro_batch_size 2 --global_batch_size 4"
    return bench_training.build_parser().parse_args(words.split())


def _train(inputs: Path, name: str, path: str, *, steps: int) -> list[float]:
    """Train experiment `name` up to `steps`; its losses from the first step on."""
    run = bench_training.resolve_run(path, _arguments(steps), inputs)
    optimizer = dataclasses.replace(run.config.optimizer, lr=3e-3, lr_decay_steps=4)
    config = dataclasses.replace(run.config, experiment=name, optimizer=optimizer)
    run = dataclasses.replace(run, config=config, experiment_dir=str(inputs / name), lr_decay_steps=4)
    (inputs / name).mkdir(exist_ok=True)
    write_run(inputs / f"{name}.json", run)
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    command = [sys.executable, str(ROOT / "pretraining" / "train.py"), "--run", str(inputs / f"{name}.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (inputs / name / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]
