"""A run that changes its model's rotary settings to train longer sequences, from its start to the release."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.formats.hf_files import HF_SOURCE
from pretrainkit.checkpoint.plan import Options
from pretrainkit.config.run_file import read_run
from pretrainkit.engine import nemo
from pretrainkit.errors import RequestError
from pretrainkit.models.registry import read_config, read_shape
from pretrainkit.release.files import verify_files
from pretrainkit.release.models import RunOptions, check_models
from pretrainkit.run import checkpoints

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
pretrain = runpy.run_path(str(REPOSITORY / "pretraining" / "pretrain.py"))["main"]
CHANGE = ["--rope_scaling", "yarn factor=4", "--rope_theta", "20000"]


def test_a_context_is_extended_from_the_start_to_the_release(
    make_hf_llama: Callable[..., Path],
    dataset_prefix: Path,
    tmp_path: Path,
    train_request: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make_hf_llama(max_position_embeddings=64, initializer_range=0.1)
    convert(model, tmp_path / "initial")
    words = f"--hf_model_id {model} --nemo_model {tmp_path / 'initial'} --dataset_path {dataset_prefix} --split 8,1,1 "
    words += "--accelerator cpu --num_gpus 1 --global_batch_size 4 --lr 1e-3 --num_workers 0 --val_interval 0 "
    words += f"--sequence_length 128 --max_steps 1 --experiments_dir {tmp_path} --start_parity require --experiment"

    def refused(experiment: str, *more: str) -> str:
        capsys.readouterr()
        assert pretrain([*words.split(), experiment, *more, "--plan"]) == 2
        return capsys.readouterr().err

    assert "context length is 64" in (message := refused("none")) and "--rope_scaling" in message
    assert "context length is 96" in refused("none", "--rope_scaling", "yarn factor=1.5")

    records = train_request([*words.split(), "long", *CHANGE])
    (parity,) = (record for record in records if record.get("event") == "start_parity")
    assert parity["result"] == "passed" and parity["num_tokens"] == 128, parity
    run = read_run(tmp_path / "long" / "run.json")
    assert (run.config.rope_scaling, run.config.rope_theta, run.model.rope_theta) == ("yarn factor=4", 20000.0, 20000.0)
    assert run.model.rope_scaling and run.model.rope_scaling.factor == 4 and run.model.max_position_embeddings == 256

    other = refused("long", "--rope_scaling", "yarn factor=8", *CHANGE[2:])
    assert "model.rope_scaling.factor was 4.0, now 8.0" in other
    assert "model.rope_theta was 20000.0, now 10000.0" in refused("long", *CHANGE[:2])

    checkpoint, released = checkpoints.newest_complete(tmp_path / "long" / "checkpoints"), tmp_path / "released"
    assert checkpoint
    stored = nemo.lightning.io.load_context(checkpoint.path / "context", subpath="model").config
    assert stored.rotary_base == 20000.0 and '"factor": 4' in stored.rope_scaling
    assert read_shape(checkpoint.path / HF_SOURCE) == run.model
    with pytest.raises(RequestError, match=r"rotary_base is 20000\.0 in the checkpoint and 10000\.0 by config\.json"):
        convert(checkpoint.path, released, Options(hf_folder=model))
    convert(checkpoint.path, released)
    config = read_config(released)
    assert config["rope_theta"] == 20000.0 and config["max_position_embeddings"] == 256
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    assert config["rope_parameters"] == {**config["rope_scaling"], "rope_theta": 20000.0}
    verdict = verify_files(checkpoint.path, released)
    assert verdict.passed, [check for check in verdict.checks if not check.passed]
    (intended,) = (check for check in verdict.checks if "that the run changed to" in check.name)
    assert "rope_theta 20000.0 (changed from 10000.0)" in intended.found
    checks = check_models(checkpoint.path, released, options=RunOptions(long_tokens=200, num_sequences=1))
    assert all(check.passed for check in checks), checks

    # The checkpoint and its release agree on another value than the run's.
    for folder in (checkpoint.path / HF_SOURCE, released):
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace("20000.0", "40000.0"))
    failed = {check.name: check.found for check in verify_files(checkpoint.path, released).checks if not check.passed}
    assert "rope_theta: 40000.0 and not 20000.0" in failed["rotary settings are those that the run changed to"]

    # Megatron's model with one scaling, transformers' with another.
    assert pretrain([*words.split(), "wrong", *CHANGE, "--dry_run"]) == 0
    assert "rotary     base 20000, scaling yarn factor=4, context 256 tokens" in capsys.readouterr().out
    run_file = tmp_path / "wrong" / "run.json"
    value = json.loads(run_file.read_text())
    value["config"]["rope_scaling"] = "yarn factor=3"
    run_file.write_text(json.dumps(value))
    with pytest.raises(AssertionError, match="the loaded model is not that of"):
        ranks.run_ranks(ranks.train_rank, 1, run_file.parent, run_file=run_file)
