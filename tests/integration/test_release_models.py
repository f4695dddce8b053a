"""The release gate as a user runs it, and its comparison of models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from hf_models import LLAMA3_ROPE
from safetensors.torch import load_file, save_file

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.release.models import RunOptions, check_models

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
SMALL = RunOptions(long_tokens=48, num_sequences=1)


@pytest.fixture(scope="module")
def release(
    make_model: Callable[..., Path], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """A Megatron checkpoint and the Hugging Face folder released from it."""
    ranks.fork_server()  # models are compared in forks of it

    def make(name: str, kind: CheckpointFormat, cut: Parallelism, **config: Any) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("release")
        shutil.copytree(make_model(name, vocab_size=320, pad_token_id=2, **config), folder / "hf")
        for path in tokenizer_folder.iterdir():
            shutil.copy(path, folder / "hf")
        convert(folder / "hf", folder / "megatron", Options(to=kind, parallelism=cut))
        convert(folder / "megatron", folder / "released")
        return folder / "megatron", folder / "released"

    return make


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"tools/{name}.py", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def verify(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_tool("verify_release", *arguments, "--long-tokens", 48, "--num-sequences", 1)


def test_command_passes_a_clean_release_and_writes_its_report(release: Callable[..., tuple[Path, Path]]) -> None:
    source, released = release("llama-tied", CheckpointFormat.TORCH, Parallelism(2, 2))
    done = verify(source, released, "--base", source.parent / "hf")
    assert [line for line in done.stderr.splitlines() if " INFO " not in line] == []  # no line of a library
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(released.with_name("released.verified.json").read_text())
    names = [check["name"] for check in report["checks"]]
    assert report["passed"] and "logits at TP=1 are those of transformers" in names
    assert "logits at TP=2 are those of transformers" in names
    assert set(report["hashes"]) == {path.name for path in released.iterdir()}
    text = released.with_name("released.verified.md").read_text()
    assert "Release check: passed" in text and "before training" in text


def test_command_refuses_a_changed_release(release: Callable[..., tuple[Path, Path]]) -> None:
    source, released = release("llama", CheckpointFormat.NEMO, Parallelism())
    config = json.loads((released / "config.json").read_text())
    (released / "config.json").write_text(json.dumps({**config, "rope_theta": 99.0}))
    done = verify(source, released, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["passed"] and report["skipped"]
    assert any("rope_theta" in check["found"] for check in report["checks"] if not check["passed"])


def test_release_that_is_no_model_is_a_wrong_request(tmp_path: Path) -> None:
    assert verify(tmp_path, tmp_path / "none").returncode == 2


def test_models_that_differ_are_noticed_by_their_logits(release: Callable[..., tuple[Path, Path]]) -> None:
    source, released = release("llama", CheckpointFormat.TORCH_DIST, Parallelism())
    config = json.loads((released / "config.json").read_text())
    rope = {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    (released / "config.json").write_text(json.dumps(config | rope))
    failed = [check.name for check in check_models(source, released, options=SMALL) if not check.passed]
    assert "logits at TP=1 are those of transformers" in failed


@pytest.mark.parametrize(
    ("long_tokens", "words"),
    [(None, "664 tokens; past original_max_position_embeddings 600"), (48, "48 tokens; NOT past original_max")],
    ids=["default", "shorter"],
)
def test_the_long_prompt_passes_every_boundary_of_positions_or_says_which_not(
    release: Callable[..., tuple[Path, Path]], long_tokens: int | None, words: str
) -> None:
    scaling = {**LLAMA3_ROPE, "original_max_position_embeddings": 600}
    source, released = release("llama3-rope", CheckpointFormat.NEMO, Parallelism(), rope_scaling=scaling)
    checks = check_models(source, released, options=RunOptions(long_tokens, num_sequences=1))
    assert all(check.passed for check in checks), checks
    (found,) = (check.found for check in checks if check.name == "long prompt")
    assert found.startswith(words)


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-next"])
def test_models_with_experts_are_compared(release: Callable[..., tuple[Path, Path]], name: str) -> None:
    checks = check_models(*release(name, CheckpointFormat.NEMO, Parallelism()), options=SMALL)
    assert all(check.passed for check in checks), checks
    assert len(checks) == 9


@pytest.mark.parametrize(
    ("name", "config"),
    [("qwen2-moe", {}), ("qwen2", {"rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 131072})],
    ids=["family", "scaling"],
)
def test_models_that_nemo_has_no_class_for_are_compared(
    release: Callable[..., tuple[Path, Path]], name: str, config: dict[str, Any]
) -> None:
    source, released = release(name, CheckpointFormat.TORCH, Parallelism(), **config)
    done = verify(source, released)
    assert done.returncode == 0 and "logits at TP=2" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama-tied", CheckpointFormat.NEMO),
        ("llama-tied", CheckpointFormat.TORCH),
        ("deepseek-v3", CheckpointFormat.NEMO),  # biases of its experts stay in fp32
    ],
)
def test_cast_release_is_compared_in_its_dtype(
    release: Callable[..., tuple[Path, Path]], name: str, kind: CheckpointFormat
) -> None:
    source, _ = release(name, kind, Parallelism())
    cast = source.with_name("cast")
    convert(source, cast, Options(dtype=torch.bfloat16))
    checks = check_models(source, cast, options=SMALL)
    assert all(check.passed for check in checks), checks
    compared = [check for check in checks if " at TP=" in check.name]
    assert len(compared) == 6
    assert all("weights rounded to bfloat16" in check.found for check in compared if "tokens" not in check.name)


def test_what_is_stored_in_one_dtype_is_not_rounded(release: Callable[..., tuple[Path, Path]]) -> None:
    checks = check_models(*release("qwen2", CheckpointFormat.NEMO, Parallelism()), options=SMALL)
    assert all(check.passed and "rounded" not in check.found for check in checks), checks


def test_wrong_weight_of_a_cast_release_is_noticed(release: Callable[..., tuple[Path, Path]]) -> None:
    source, _ = release("llama", CheckpointFormat.NEMO, Parallelism())
    cast = source.with_name("cast")
    convert(source, cast, Options(dtype=torch.bfloat16))
    weights = load_file(cast / "model.safetensors")
    name = "model.layers.3.self_attn.o_proj.weight"
    weights[name] = weights[name].flip(0)
    save_file(weights, cast / "model.safetensors", metadata={"format": "pt"})
    failed = [check.name for check in check_models(source, cast, options=SMALL) if not check.passed]
    assert "logits at TP=1 are those of transformers" in failed


def test_conversion_that_casts_passes_its_own_test_of_precision(release: Callable[..., tuple[Path, Path]]) -> None:
    source, _ = release("llama", CheckpointFormat.NEMO, Parallelism())
    flags = ("--dtype", "bfloat16", "--test-precision")
    there = run_tool("convert_checkpoint", source.parent / "hf", source.with_name("there"), *flags)
    assert there.returncode == 0 and "weights rounded to bfloat16" in there.stdout, there.stdout + there.stderr
    back = run_tool("convert_checkpoint", source, source.with_name("back"), *flags)
    assert back.returncode == 0 and "weights rounded to bfloat16" in back.stdout, back.stdout + back.stderr


def test_config_fields_to_ignore_are_ignored_where_models_run(release: Callable[..., tuple[Path, Path]]) -> None:
    source, _ = release("llama", CheckpointFormat.NEMO, Parallelism())
    folder, flags = source.parent, ("--ignore-config-fields", "max_sequence_length")
    config = json.loads((folder / "hf" / "config.json").read_text())
    (folder / "hf" / "config.json").write_text(json.dumps({**config, "max_sequence_length": 4096}))
    there = run_tool(
        "convert_checkpoint", folder / "hf", folder / "torch", "--target-format", "torch", "--test-precision", *flags
    )
    assert there.returncode == 0 and "ok: logits at TP=1" in there.stdout, there.stdout + there.stderr
    back = run_tool("convert_checkpoint", folder / "torch", folder / "back", *flags)
    assert back.returncode == 0, back.stderr
    done = verify(folder / "torch", folder / "back", *flags)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "planted", "first", "before"),
    [
        ("qwen2", "model.layers.2.mlp.up_proj.weight", "model.layers.2.mlp.up_proj", "model.layers.2.mlp.gate_proj"),
        ("qwen3", "model.layers.1.self_attn.k_norm.weight", "model.layers.1.self_attn.k_norm", "self_attn.q_norm"),
        ("qwen3-moe", "model.layers.3.self_attn.v_proj.weight", "model.layers.3.self_attn.v_proj", "self_attn.k_proj"),
        ("llama-tied", "rope_theta", "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.v_proj"),
    ],
    ids=["mlp", "norm", "experts", "rotary"],
)
def test_the_first_module_that_differs_is_named(
    release: Callable[..., tuple[Path, Path]], name: str, planted: str, first: str, before: str
) -> None:
    source, released = release(name, CheckpointFormat.NEMO, Parallelism())
    if planted == "rope_theta":
        config = json.loads((released / "config.json").read_text())
        (released / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0, "rope_parameters": None}))
    else:
        weights = load_file(released / "model.safetensors")
        weights[planted] = weights[planted].flip(0)
        save_file(weights, released / "model.safetensors", metadata={"format": "pt"})
    checks = {check.name: check for check in check_models(source, released, options=SMALL)}
    for size in (1, 2):
        found = checks[f"where the models part at TP={size}"]
        assert not found.passed and f"the outputs of {first} (Megatron-core: decoder.layers." in found.found
        assert found.found.endswith(f"{before}"), found.found
