"""The arguments of a run travel with its weights between Megatron-LM's formats."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrainkit.checkpoint.convert import Report, convert
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options

MEGATRON = (CheckpointFormat.TORCH, CheckpointFormat.TORCH_DIST)
FILES = {CheckpointFormat.TORCH: "mp_rank_00/model_optim_rng.pt", CheckpointFormat.TORCH_DIST: "common.pt"}
RUN: dict[str, Any] = {
    "seq_length": 77,
    "attention_dropout": 0.25,
    "tokenizer_type": "SentencePieceTokenizer",
    "tokenizer_model": "/data/tokenizer.model",
    "consumed_train_samples": 9600,
    "our_own_flag": [("a", 1), {"b": None}],
    "decoder_first_pipeline_num_layers": 3,
    "virtual_pipeline_model_parallel_size": 2,
    "expert_tensor_parallel_size": 4,
}


class Backend(enum.Enum):
    """What Megatron-LM keeps of --attention-backend: an object of a class."""

    AUTO = 1


@pytest.fixture
def make_run(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint with the arguments of a run; keyword arguments are those of Options."""

    def make(kind: CheckpointFormat, **options: Any) -> Path:
        folder = tmp_path / "run"
        convert(make_model("llama"), folder, Options(to=kind, **options))
        (path,) = folder.glob(f"*/{FILES[kind]}")
        state = torch.load(path, weights_only=False)
        state["args"] = argparse.Namespace(**{**vars(state["args"]), **RUN}, attention_backend=Backend.AUTO)
        state["num_floating_point_operations_so_far"] = 10**21
        torch.save(state, path)
        return folder

    return make


def state_of(report: Report) -> dict[str, Any]:
    (path,) = Path(report.target).glob(f"*/{FILES[CheckpointFormat(report.target_kind)]}")
    return dict(torch.load(path, weights_only=False, map_location="meta"))


@pytest.mark.parametrize("kind", MEGATRON, ids=str)
@pytest.mark.parametrize("source", MEGATRON, ids=str)
def test_the_arguments_of_a_run_are_carried_over(
    make_run: Callable[..., Path], tmp_path: Path, source: CheckpointFormat, kind: CheckpointFormat
) -> None:
    run = make_run(source, iteration=1200)
    report = convert(run, tmp_path / "target", Options(to=kind))
    state = state_of(report)
    arguments = vars(state["args"])
    expected = {
        **RUN,
        "decoder_first_pipeline_num_layers": None,
        "virtual_pipeline_model_parallel_size": None,
        "expert_tensor_parallel_size": 1,
        "ckpt_format": str(kind),
    }
    assert {name: arguments[name] for name in expected} == expected
    assert "attention_backend" not in arguments
    assert state["iteration"] == 1200 and state["num_floating_point_operations_so_far"] == 10**21
    assert (tmp_path / "target" / "latest_checkpointed_iteration.txt").read_text() == "1200"
    notes = "\n".join(report.notes)
    assert "expert_tensor_parallel_size 4 to 1" in notes and "virtual_pipeline_model_parallel_size 2 to None" in notes
    assert "seq_length" not in notes and "our_own_flag" not in notes
    assert "attention_backend (Backend)" in notes
    assert "--no-load-optim --no-load-rng" in notes and "--tokenizer-model" not in notes


def test_the_cut_of_the_target_is_its_own(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(CheckpointFormat.TORCH_DIST, iteration=1200)
    options = Options(CheckpointFormat.TORCH_DIST, parallelism=Parallelism(2, 2, 1, 1), iteration=7)
    state = state_of(convert(run, tmp_path / "target", options))
    arguments = state["args"]
    assert (arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size) == (2, 2)
    assert (arguments.decoder_first_pipeline_num_layers, arguments.padded_vocab_size) == (1, 512)
    assert state["iteration"] == 7


def test_a_release_stays_one_and_other_targets_say_what_they_leave_out(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(CheckpointFormat.TORCH_DIST)
    assert state_of(convert(run, tmp_path / "torch", Options(CheckpointFormat.TORCH)))["iteration"] == 0
    assert (tmp_path / "torch" / "release").is_dir()
    for kind in (CheckpointFormat.HF, CheckpointFormat.NEMO):
        notes = convert(run, tmp_path / kind, Options(kind)).notes
        assert any(f"arguments of the checkpoint's run left out: {kind} has no place" in note for note in notes)


def test_megatron_lm_is_pointed_to_the_tokenizer(make_model: Callable[..., Path], tmp_path: Path) -> None:
    notes = convert(make_model("llama"), tmp_path / "m", Options(CheckpointFormat.TORCH)).notes
    assert any("--tokenizer-model CHECKPOINT/hf_source" in note and "--no-load-optim" not in note for note in notes)
