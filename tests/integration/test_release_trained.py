"""A model that was trained at some layout is released: the trained bits, the files of the source, the same loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.release.files import verify_files
from pretrainkit.release.models import RunOptions, check_models

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}, {"data_parallel": 2}],
    ids=["TP2-SP", "PP2", "DP2-distributed-optimizer"],
)
def test_trained_checkpoint_is_released(
    make_hf_llama: Callable[..., Path],
    train_tiny: Callable[..., list[dict[str, Any]]],
    weights: Callable[[Path], dict[str, Any]],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
    layout: dict[str, Any],
) -> None:
    import torch

    source = make_hf_llama(num_hidden_layers=2, tie_word_embeddings=True)
    convert(source, tmp_path / "initial")
    train_tiny(source, "trained", initial_checkpoint=tmp_path / "initial", max_steps=2, **layout)
    (checkpoint,) = (tmp_path / "trained" / "checkpoints").iterdir()
    report = convert(checkpoint, tmp_path / "released")
    assert any("optimizer" in note for note in report.notes)
    before, after = weights(source), weights(tmp_path / "released")
    assert all(not torch.equal(before[name], after[name]) for name in before)
    verdict = verify_files(checkpoint, tmp_path / "released")
    assert verdict.passed, [check for check in verdict.checks if not check.passed]
    if "tensor" in layout:
        options = RunOptions(long_tokens=48, num_sequences=1, base=source)
        checks = check_models(checkpoint, tmp_path / "released", options=options)
        assert all(check.passed for check in checks), checks
    # Resharding what was trained loses nothing either.
    convert(checkpoint, tmp_path / "torch", Options(to=CheckpointFormat.TORCH, parallelism=Parallelism(2, 2)))
    convert(tmp_path / "torch", tmp_path / "again")
    assert_same(tmp_path / "released", tmp_path / "again")
