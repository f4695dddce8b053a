"""The release gate passes clean models and refuses every planted fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.release.files import verify_files

LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def made(
    make_model: Callable[..., Path], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """A Megatron checkpoint and the Hugging Face folder released from it."""
    done: dict[Any, tuple[Path, Path]] = {}

    def make(
        name: str, kind: CheckpointFormat = CheckpointFormat.NEMO, cut: Parallelism | None = None, **config: Any
    ) -> tuple[Path, Path]:
        key = (name, kind, cut, repr(config))
        if key not in done:
            folder = tmp_path_factory.mktemp("release")
            shutil.copytree(make_model(name, vocab_size=320, pad_token_id=2, **config), folder / "hf")
            for path in tokenizer_folder.iterdir():
                shutil.copy(path, folder / "hf")
            convert(folder / "hf", folder / "megatron", Options(to=kind, parallelism=cut or Parallelism()))
            convert(folder / "megatron", folder / "released", Options(max_shard_bytes=200_000))
            done[key] = folder / "megatron", folder / "released"
        return done[key]

    return make


@pytest.mark.parametrize("cut", [Parallelism(), Parallelism(2, 2)], ids=["TP1", "TP2-PP2"])
@pytest.mark.parametrize("kind", list(CheckpointFormat)[1:], ids=str)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3-moe"])
def test_clean_model_passes(
    made: Callable[..., tuple[Path, Path]], name: str, kind: CheckpointFormat, cut: Parallelism
) -> None:
    verdict = verify_files(*made(name, kind, cut))
    assert verdict.passed, [check for check in verdict.checks if not check.passed]
    assert "config.json" in verdict.hashes and "model.safetensors.index.json" in verdict.hashes


def change_tensor(released: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Rewrite one tensor of a release in its file."""
    from safetensors.torch import load_file, save_file

    index = json.loads((released / "model.safetensors.index.json").read_text())
    path = released / index["weight_map"][name]
    tensors = load_file(path)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def change_json(path: Path, **values: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def swap_rows(released: Path) -> None:
    change_tensor(released, LAYER + "mlp.up_proj.weight", lambda tensor: tensor[[1, 0, *range(2, len(tensor))]])


def zero_norm(released: Path) -> None:
    change_tensor(released, LAYER + "input_layernorm.weight", lambda tensor: tensor * 0)


def exchange_query_and_key(released: Path) -> None:
    from safetensors.torch import load_file

    tensors = {name: value for path in released.glob("*.safetensors") for name, value in load_file(path).items()}
    query, key = (f"{LAYER}self_attn.{name}_proj.weight" for name in "qk")
    change_tensor(released, query, lambda _: tensors[key])
    change_tensor(released, key, lambda _: tensors[query])


def drop_layer(released: Path) -> None:
    from safetensors.torch import load_file, save_file

    index_path = released / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    for path in released.glob("*.safetensors"):
        kept = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("model.layers.3.")}
        save_file(kept, path, metadata={"format": "pt"})
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if not k.startswith("model.layers.3.")}
    index_path.write_text(json.dumps(index))
    change_json(released / "config.json", num_hidden_layers=3)


def transpose_square(released: Path) -> None:
    change_tensor(released, LAYER + "self_attn.o_proj.weight", lambda tensor: tensor.T)


def untie(released: Path) -> None:
    from safetensors.torch import load_file, save_file

    index_path = released / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    path = released / index["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 1.01
    save_file(tensors, path, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = path.name
    index_path.write_text(json.dumps(index))


def wrong_theta(released: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    change_json(released / "config.json", rope_theta=500000.0, rope_parameters=parameters)


def round_to_int8(released: Path) -> None:
    def rounded(tensor: Any) -> Any:
        scale = tensor.abs().max() / 127
        return (tensor / scale).round() * scale

    change_tensor(released, LAYER + "mlp.down_proj.weight", rounded)


def first_file(released: Path) -> Path:
    return min(released.glob("*.safetensors"))


FAULTS = {
    "two rows swapped": (swap_rows, "bit-equal"),
    "a zeroed norm": (zero_norm, "zeros"),
    "query and key exchanged": (exchange_query_and_key, "bit-equal"),
    "one layer missing": (drop_layer, "every tensor is there"),
    "a transposed square matrix": (transpose_square, "bit-equal"),
    "tied weights diverged": (untie, "tied weights"),
    "wrong rope theta": (wrong_theta, "config.json"),
    "int8-rounded weights": (round_to_int8, "bit-equal"),
    "one element not finite": (
        lambda folder: change_tensor(
            folder, LAYER + "mlp.up_proj.weight", lambda t: t.index_fill(0, t.new_tensor([3]).long(), float("inf"))
        ),
        "finite",
    ),
    "another dtype than config.json": (lambda folder: change_json(folder / "config.json", dtype="bfloat16"), "dtype"),
    "vocab_size beyond the rows": (lambda folder: change_json(folder / "config.json", vocab_size=321), "config.json"),
    "eos_token_id changed": (lambda folder: change_json(folder / "config.json", eos_token_id=0), "special token ids"),
    "generation config changed": (lambda folder: change_json(folder / "generation_config.json", top_k=3), "source's"),
    "tokenizer missing": (lambda folder: (folder / "tokenizer.json").unlink(), "source's"),
    "a weight file cut": (
        lambda folder: first_file(folder).write_bytes(b"\x10" * 4000),
        "weight files",
    ),
    "a weight file too many": (
        lambda folder: shutil.copy(first_file(folder), folder / "old.safetensors"),
        "no other weight files",
    ),
    "an access token": (lambda folder: (folder / "README.md").write_text("hf_" + "a" * 34), "access tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_refused(made: Callable[..., tuple[Path, Path]], tmp_path: Path, fault: str) -> None:
    # As many key/value heads as heads, so that query and key have one shape.
    source, clean = made("llama-tied", num_key_value_heads=8)
    released = tmp_path / "released"
    shutil.copytree(clean, released)
    plant, expected = FAULTS[fault]
    plant(released)
    verdict = verify_files(source, released)
    assert not verdict.passed
    failed = [check.name for check in verdict.checks if not check.passed]
    assert any(expected in name for name in failed), failed


@pytest.mark.parametrize("kind", list(CheckpointFormat)[1:], ids=str)
def test_wrong_rope_theta_of_the_carried_config_is_refused(
    made: Callable[..., tuple[Path, Path]], tmp_path: Path, kind: CheckpointFormat
) -> None:
    """Source and release may both have been given the wrong config.json: the checkpoint's own settings tell."""
    source, released = made("llama", kind)
    wrong = tmp_path / "hf"
    wrong.mkdir()
    for path in (source / "hf_source").iterdir():
        shutil.copy(path, wrong)
    wrong_theta(wrong)
    shutil.copytree(released, tmp_path / "released")
    wrong_theta(tmp_path / "released")
    verdict = verify_files(source, tmp_path / "released", hf_folder=wrong)
    assert not verdict.passed
    assert any("rotary_base" in check.found for check in verdict.checks if not check.passed)


@pytest.mark.parametrize("card", [None, "# Our model"], ids=["removed", "written anew"])
def test_a_release_may_have_a_card_of_its_own(
    make_model: Callable[..., Path], tmp_path: Path, card: str | None
) -> None:
    source = shutil.copytree(make_model("llama"), tmp_path / "hf")
    (source / "README.md").write_text("# The model that training began with")
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "released")
    (tmp_path / "released" / "README.md").unlink()
    if card:
        (tmp_path / "released" / "README.md").write_text(card)
    checks = {check.name: check.passed for check in verify_files(tmp_path / "megatron", tmp_path / "released").checks}
    assert checks["tokenizer, template and generation files are the source's"]


def test_biases_of_experts_may_be_zeros_and_are_not_cast(
    make_model: Callable[..., Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(make_model("deepseek-v3", vocab_size=320, pad_token_id=2), tmp_path / "hf")
    shutil.copytree(tokenizer_folder, source, dirs_exist_ok=True)
    weights = load_file(source / "model.safetensors")
    biases = [name for name in weights if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    save_file(weights | {biases[0]: torch.zeros(8)}, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "released", Options(dtype=torch.bfloat16))
    verdict = verify_files(tmp_path / "megatron", tmp_path / "released")
    assert verdict.passed, [check for check in verdict.checks if not check.passed]
    released = load_file(tmp_path / "released" / "model.safetensors")
    assert {str(released[name].dtype) for name in biases} == {"torch.float32"}
    rounded = released | {biases[1]: released[biases[1]].bfloat16()}
    save_file(rounded, tmp_path / "released" / "model.safetensors", metadata={"format": "pt"})
    failed = [check for check in verify_files(tmp_path / "megatron", tmp_path / "released").checks if not check.passed]
    assert any(f"{biases[1]} must not be cast" in check.found for check in failed), failed
