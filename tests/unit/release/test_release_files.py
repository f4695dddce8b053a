"""What lies beside the weights of a released model, and how its files are cut."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import other_transformers
import pytest
import torch

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.errors import RequestError
from pretrainkit.models.hf_config import in_both_spellings
from pretrainkit.models.registry import family_named
from pretrainkit.release.files import verify_files

SIDE_FILES = {
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer.model": "sentencepiece",
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [1, 2]}',
    "modeling_x.py": "X = 1",
    "README.md": "# Model",
    "LICENSE": "free",
}
GIVEN = Path(__file__).parents[2] / "data" / "generation5"
LEFT_BEHIND = {"pytorch_model.bin": "x", "optimizer.pt": "x", "training_args.bin": "x", ".gitattributes": "x"}


@pytest.fixture
def source(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    folder = shutil.copytree(make_model("llama"), tmp_path / "hf")
    for name, text in (SIDE_FILES | LEFT_BEHIND).items():
        (folder / name).write_text(text)
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", list(CheckpointFormat)[1:], ids=str)
def test_side_files_come_back_byte_for_byte(source: Path, tmp_path: Path, kind: CheckpointFormat) -> None:
    convert(source, tmp_path / "m", Options(to=kind))
    report = convert(tmp_path / "m", tmp_path / "back", Options(keep_config=True))
    assert {path.name for path in (tmp_path / "back").iterdir()} == {*SIDE_FILES, "config.json", "model.safetensors"}
    assert all(sha256(tmp_path / "back" / name) == sha256(source / name) for name in SIDE_FILES)
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert "config.json and tokenizer_config.json are the source's bytes (--keep-config)" in report.notes


def test_config_keeps_all_but_the_dtype_and_local_paths(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config |= {"eos_token_id": 2, "pad_token_id": 2, "_name_or_path": "/models/someone/model"}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "back", Options(dtype=torch.bfloat16))
    released = json.loads((tmp_path / "back" / "config.json").read_text())
    del config["_name_or_path"]
    assert released == {**in_both_spellings(config, family_named("llama")), "dtype": "bfloat16"}
    assert {**config, "dtype": "bfloat16"}.items() <= released.items()
    assert report.dtypes == {"bfloat16": 39}
    assert any("39 tensors cast from float32 to bfloat16" in note for note in report.notes)


def test_no_path_of_the_machine_stays_in_a_checkpoint(source: Path, tmp_path: Path) -> None:
    for kind in CheckpointFormat:
        convert(source, tmp_path / f"to-{kind}", Options(to=kind))
        for path in (tmp_path / f"to-{kind}").rglob("*"):
            assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), path


def test_files_are_cut_at_the_limit_and_listed(
    source: Path,
    weights: Callable[[Path], dict[str, torch.Tensor]],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    convert(source, tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "back", Options(max_shard_bytes=100_000, workers=2))
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 5
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights(source).values())
    assert all(path.stat().st_size < 110_000 for path in files)
    assert_same(source, tmp_path / "back")


def test_transformers_loads_a_release_with_every_weight(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert(source, tmp_path / "m", Options(to=CheckpointFormat.TORCH_DIST))
    convert(tmp_path / "m", tmp_path / "back")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama3-rope"])
def test_flags_that_megatron_lm_needs_are_told(make_model: Callable[..., Path], tmp_path: Path, name: str) -> None:
    notes = " ".join(convert(make_model(name), tmp_path / "m", Options(to=CheckpointFormat.TORCH_DIST)).notes)
    assert "--norm-epsilon 1e-06" in notes
    assert ("--qk-layernorm" in notes) == (name == "qwen3")
    assert ("--use-rope-scaling --rope-scaling-factor 32" in notes) == (name == "llama3-rope")


@pytest.mark.parametrize("iteration", [None, 0, 1200])
@pytest.mark.parametrize("kind", [CheckpointFormat.TORCH, CheckpointFormat.TORCH_DIST], ids=str)
def test_tracker_names_what_was_written(
    source: Path, tmp_path: Path, kind: CheckpointFormat, iteration: int | None
) -> None:
    convert(source, tmp_path / "m", Options(to=kind, iteration=iteration))
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    assert (tmp_path / "m" / name).is_dir()
    tracked = (tmp_path / "m" / "latest_checkpointed_iteration.txt").read_text()
    assert tracked == ("release" if iteration is None else str(iteration))
    for given in (tmp_path / "m", tmp_path / "m" / name):
        convert(given, tmp_path / "back", Options(overwrite=True))


@pytest.mark.parametrize("name", ["llama-default", "mixtral", "qwen2-bias", "qwen3-moe"])
def test_a_release_of_a_folder_of_transformers_5_is_in_both_spellings(name: str, tmp_path: Path) -> None:
    source = GIVEN / name
    config, tokenizer = (json.loads((source / f).read_text()) for f in ("config.json", "tokenizer_config.json"))
    convert(source, tmp_path / "m", Options(to=CheckpointFormat.TORCH_DIST))
    report = convert(tmp_path / "m", tmp_path / "back")
    added = {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None}
    added |= {"num_experts": 4} if name == "qwen3-moe" else {}
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {**config, **added}
    assert all(any(field in note for note in report.notes) for field in added)
    del tokenizer["extra_special_tokens"]
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text()) == {
        **tokenizer,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|x|>"],
    }
    assert any('instead of extra_special_tokens ["<|x|>"]' in note for note in report.notes)
    verdict = verify_files(tmp_path / "m", tmp_path / "back")
    assert verdict.passed, verdict.as_markdown()
    assert "added: " in verdict.checks[0].found and "rope_theta" in verdict.checks[0].found
    # transformers 5 takes this class for every model of type qwen2, and it adds a token to the tokenizer.
    classes = ["Qwen2Tokenizer"] if name == "qwen2-bias" and other_transformers.INSTALLED == 5 else []
    assert len(verdict.notes) == len(classes) and all("Qwen2Tokenizer" in note for note in verdict.notes)


def test_a_kept_config_of_transformers_5_is_released_with_a_warning(tmp_path: Path) -> None:
    convert(GIVEN / "qwen3-moe", tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "back", Options(keep_config=True))
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        assert sha256(tmp_path / "back" / name) == sha256(GIVEN / "qwen3-moe" / name)
    verdict = verify_files(tmp_path / "m", tmp_path / "back")
    assert verdict.passed, verdict.as_markdown()
    for text in ("\n".join(report.notes), "\n".join(verdict.notes), verdict.as_markdown()):
        assert "rope_theta 10000.0 and not 1000000.0" in text and "num_experts 128 and not 4" in text


def test_a_config_that_would_state_another_dtype_is_not_kept(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"config\.json says float32, the weights are bfloat16"):
        convert(source, tmp_path / "back", Options(CheckpointFormat.HF, dtype=torch.bfloat16, keep_config=True))
    with pytest.raises(RequestError, match="the target is nemo"):
        convert(source, tmp_path / "back", Options(keep_config=True))
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta: 5.0"),
        ({"rope_theta": 5.0}, "rope_theta 5.0 and rope_parameters.rope_theta 10000.0 contradict"),
        ({"sliding_window": 64}, "sliding_window: 64"),
        ({"rms_norm_eps": "absent", "initializer_range": "absent"}, ""),
    ],
    ids=["another-base", "contradiction", "unknown", "absent-defaults"],
)
def test_the_gate_compares_what_a_config_means(
    source: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    convert(source, tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text()) | changes
    changed = {name: value for name, value in config.items() if value != "absent"}
    (tmp_path / "back" / "config.json").write_text(json.dumps(changed))
    failed = [check for check in verify_files(tmp_path / "m", tmp_path / "back").checks if not check.passed]
    found = [check.found for check in failed if check.name.startswith("config.json")]
    assert any(words in text for text in found) if words else not found


def test_the_report_names_fields_that_have_the_default_of_their_class(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    del config["rms_norm_eps"]
    (source / "config.json").write_text(json.dumps(config))
    (note,) = (note for note in convert(source, tmp_path / "m").notes if "leaves out" in note)
    assert "rms_norm_eps 1e-06" in note
