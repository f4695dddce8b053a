"""gpt-oss as it is published, its experts in MXFP4: converted exactly, trained, and released in bf16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.plan import Options
from pretrainkit.errors import RequestError
from pretrainkit.release.files import verify_files
from pretrainkit.release.models import RunOptions, check_models

pytestmark = pytest.mark.integration
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


@pytest.fixture
def published(make_model: Callable[..., Path], tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A tiny model in the form of the published ones, with every value that a block can have."""
    folder = shutil.copytree(make_model("gpt-oss", vocab_size=320, dtype="bfloat16"), tmp_path / "published")
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, num_in, num_out = tensors.pop(name).shape
        size = (experts, num_out, num_in // 32)
        tensors[name + "_blocks"] = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
        tensors[name + "_scales"] = torch.randint(116, 124, size, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": METHOD}))
    return folder


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with their experts in bf16, by transformers' own function."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        found[name] = convert_moe_packed_tensors(tensors[name + "_blocks"], tensors[name + "_scales"])
    return found


def test_every_value_is_exact_and_the_way_back_is_bf16(published: Path, tmp_path: Path) -> None:
    convert(published, tmp_path / "nemo")
    convert(tmp_path / "nemo", tmp_path / "back")
    expected, found = (load_file(folder / "model.safetensors") for folder in (published, tmp_path / "back"))
    expected = unpacked(expected)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


def test_a_run_from_published_weights_starts_at_their_loss_and_passes_the_gate(
    published: Path, tmp_path: Path, train_tiny: Callable[..., list[dict[str, Any]]]
) -> None:
    convert(published, tmp_path / "initial")
    records = train_tiny(published, "run", max_steps=2, initial_checkpoint=tmp_path / "initial", hf_weights=published)
    (parity,) = (record for record in records if record.get("event") == "start_parity")
    assert parity["result"] == "passed", parity
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    convert(checkpoint, tmp_path / "released", Options(dtype=torch.bfloat16))
    verdict = verify_files(checkpoint, tmp_path / "released")
    assert verdict.passed, [check for check in verdict.checks if not check.passed]
    options = RunOptions(long_tokens=48, num_sequences=1, base=published)
    checks = check_models(checkpoint, tmp_path / "released", options=options)
    assert all(check.passed for check in checks), [check for check in checks if not check.passed]


def test_another_quantization_is_refused(published: Path, tmp_path: Path) -> None:
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(RequestError, match="quant_method 'fp8' is not supported"):
        convert(published, tmp_path / "nemo")


def test_a_matrix_without_scales_is_refused(published: Path, tmp_path: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"missing: model.layers.1.mlp.experts.down_proj_scales"):
        convert(published, tmp_path / "nemo")
