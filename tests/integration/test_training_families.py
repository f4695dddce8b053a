"""Each family of models that can be trained goes all the way: weights in, a stop, the end, a release."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks

from pretrainkit.checkpoint.convert import convert
from pretrainkit.engine import nemo
from pretrainkit.models.registry import read_shape
from pretrainkit.release.files import verify_files
from pretrainkit.release.models import RunOptions, check_models
from pretrainkit.run import checkpoints

pytestmark = pytest.mark.integration


def _losses(records: list[dict[str, Any]]) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.mark.parametrize("name", ["llama3-rope", "qwen2-tied", "qwen3", "deepseek-v3"])
def test_a_model_is_trained_stopped_continued_and_released(
    name: str,
    make_model: Callable[..., Path],
    tokenizer_folder: Path,
    tmp_path: Path,
    train_tiny: Callable[..., list[dict[str, Any]]],
    assert_same: Callable[[Path, Path], None],
) -> None:
    source = shutil.copytree(make_model(name, vocab_size=320, pad_token_id=2), tmp_path / "hf")
    shutil.copytree(tokenizer_folder, source, dirs_exist_ok=True)
    if name == "llama3-rope":  # as Mistral is published: the same weights again, with other names
        shutil.copy(source / "model.safetensors", source / "consolidated.safetensors")
    initial = tmp_path / "initial"
    convert(source, initial)
    start = {"initial_checkpoint": initial, "hf_weights": source, "save_interval": 2}
    unbroken = train_tiny(source, "unbroken", max_steps=4, **start)
    (parity,) = (record for record in unbroken if record.get("event") == "start_parity")
    assert parity["result"] == "passed", parity

    train_tiny(source, "stopped", max_steps=2, **start)
    assert _losses(train_tiny(source, "stopped", max_steps=4, **start)) == _losses(unbroken)

    checkpoint = checkpoints.newest_complete(tmp_path / "stopped" / "checkpoints")
    assert checkpoint and checkpoint.step == 4
    config, shape = (
        nemo.lightning.io.load_context(checkpoint.path / "context", subpath="model").config,
        read_shape(source),
    )
    assert (config.num_layers, config.hidden_size) == (shape.num_layers, shape.hidden_size)
    if not shape.features.names():  # of which the context has them in its own fields
        assert getattr(config, "scale_factor", None) == (shape.rope_scaling and shape.rope_scaling.factor)

    convert(checkpoint.path, tmp_path / "released")
    convert(tmp_path / "unbroken" / "checkpoints" / checkpoint.path.name, tmp_path / "expected")
    assert_same(tmp_path / "released", tmp_path / "expected")
    verdict = verify_files(checkpoint.path, tmp_path / "released")
    assert verdict.passed, [check for check in verdict.checks if not check.passed]
    options = RunOptions(long_tokens=48, num_sequences=1, base=source)
    checks = check_models(checkpoint.path, tmp_path / "released", options=options)
    assert all(check.passed for check in checks), checks


def _trained(
    name: str,
    make_model: Callable[..., Path],
    tokenizer_folder: Path,
    folder: Path,
    train_tiny: Callable[..., list[dict[str, Any]]],
) -> Path:
    """A checkpoint of one step that began with the weights of a random model."""
    source = shutil.copytree(make_model(name, vocab_size=320, pad_token_id=2), folder / "hf")
    shutil.copytree(tokenizer_folder, source, dirs_exist_ok=True)
    convert(source, folder / "initial")
    train_tiny(source, "trained", max_steps=1, initial_checkpoint=folder / "initial", hf_weights=source)
    checkpoint = checkpoints.newest_complete(folder / "trained" / "checkpoints")
    assert checkpoint
    return checkpoint.path


# Not qwen2-tied: NeMo's exporter of Qwen2 refuses models with tied embeddings.
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama3-rope", "mistral", "qwen2", "qwen3"])
def test_nemos_exporter_writes_the_model_that_was_trained(
    name: str,
    make_model: Callable[..., Path],
    tokenizer_folder: Path,
    tmp_path: Path,
    train_tiny: Callable[..., list[dict[str, Any]]],
    assert_same: Callable[[Path, Path], None],
) -> None:
    checkpoint = _trained(name, make_model, tokenizer_folder, tmp_path, train_tiny)
    exported, converted = tmp_path / "exported", tmp_path / "converted"
    ranks.run_ranks(ranks.nemo_export_rank, 1, tmp_path, checkpoint=checkpoint, output=exported)
    convert(checkpoint, converted)
    assert_same(converted, exported)
    ours, nemos = (json.loads((folder / "config.json").read_text()) for folder in (converted, exported))
    for field in ("architectures", "max_position_embeddings", "vocab_size", "tie_word_embeddings"):
        assert nemos.get(field) == ours.get(field), field
    if "rope" in name:  # in the spelling of the transformers that writes it
        assert read_shape(exported).rope_scaling == read_shape(converted).rope_scaling
