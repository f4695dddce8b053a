"""The text model of a multimodal folder is converted, trained and released; the rest of the model goes along."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import pytest
import ranks
import torch
from safetensors.torch import load_file, save_file

from pretrainkit.checkpoint.added_tokens import NewToken
from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.formats.carried import CARRIED_NAME
from pretrainkit.checkpoint.formats.hf_files import HF_SOURCE
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.errors import RequestError
from pretrainkit.models.registry import read_config, read_shape
from pretrainkit.release.files import verify_files
from pretrainkit.release.models import RunOptions, check_models
from pretrainkit.run import checkpoints

pytestmark = pytest.mark.integration
MakeFolder = Callable[[str], Path]
QWEN = {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]])}
IMAGES: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "gemma3": (4, (3, 28, 28), {}),
    "gemma4": (4, (16, 48), {"image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4))[None]}),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), (4, (48,), QWEN)),
    "mistral3": (2, (3, 56, 28), {"image_sizes": torch.tensor([[56, 28]])}),
}
"""Type of a multimodal model -> tokens of an image, the size of its pixels (patches, in Gemma 4), and other inputs."""


@pytest.fixture(scope="module")
def multimodal(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """A factory of multimodal folders with a tokenizer; a new one each time."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "hf"
        hf_models.save_multimodal_model(name, folder, vocab_size=320, pad_token_id=2)
        return shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)

    return make


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def logits_with_an_image(folder: Path) -> torch.Tensor:
    """Those of the multimodal model in transformers, for the tokens of an image between text.

    Of Llama 4's text model without an image, as transformers 5.24 fails with the whole.
    """
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    if model.config.model_type == "llama4":
        with torch.no_grad():
            return model.language_model(torch.tensor([[5, 9, 20, 30]])).logits
    number, size, more = IMAGES[model.config.model_type]
    ids = torch.tensor([[5, 9, *[7] * number, 20, 30]])
    pixels = torch.rand((16 if "image_grid_thw" in more else 1, *size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, pixel_values=pixels, **more).logits


@pytest.mark.parametrize("name", hf_models.MULTIMODAL)
@pytest.mark.parametrize("kind", [CheckpointFormat.NEMO, CheckpointFormat.HF], ids=str)
def test_a_round_trip_keeps_every_tensor_and_what_the_model_computes_of_images(
    name: str, kind: CheckpointFormat, multimodal: MakeFolder, tmp_path: Path
) -> None:
    source = multimodal(name)
    assert read_shape(source).family == {"ministral3": "ministral3"}.get(name, f"{name.replace('-', '_')}_text")
    report = convert(source, tmp_path / "there", Options(to=kind))
    assert any("tensors of the rest of the model go along" in note for note in report.notes)
    convert(tmp_path / "there", tmp_path / "back", Options(to=CheckpointFormat.HF))
    before, after = tensors(source), tensors(tmp_path / "back")
    assert before.keys() == after.keys() and len(list((tmp_path / "back").glob("*.safetensors"))) == 2
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert torch.equal(logits_with_an_image(tmp_path / "back"), logits_with_an_image(source))


def test_the_text_model_is_trained_and_the_whole_released(
    multimodal: MakeFolder, tmp_path: Path, train_tiny: Callable[..., list[dict[str, Any]]]
) -> None:
    ranks.fork_server()
    source = multimodal("gemma3")
    convert(source, tmp_path / "initial")
    records = train_tiny(source, "run", max_steps=1, initial_checkpoint=tmp_path / "initial", hf_weights=source)
    (parity,) = (record for record in records if record.get("event") == "start_parity")
    assert parity["result"] == "passed", parity
    checkpoint, released = checkpoints.newest_complete(tmp_path / "run" / "checkpoints"), tmp_path / "released"
    assert checkpoint and (checkpoint.path / HF_SOURCE / CARRIED_NAME).is_file()
    convert(checkpoint.path, released)

    before, after = tensors(source), tensors(released)
    assert before.keys() == after.keys()
    rest = {key for key in before if not key.startswith("language_model.")}
    assert {key for key in before if torch.equal(before[key], after[key])} == rest and len(rest) > 30
    assert (released / "preprocessor_config.json").read_bytes() == (source / "preprocessor_config.json").read_bytes()
    verdict = verify_files(checkpoint.path, released)
    assert verdict.passed, [check for check in verdict.checks if not check.passed]
    assert any(check.found == f"{len(rest)} tensors bit-equal" for check in verdict.checks)
    options = RunOptions(long_tokens=64, num_sequences=1, base=source)
    checks = check_models(checkpoint.path, released, options=options)
    assert all(check.passed for check in checks), checks
    assert logits_with_an_image(released).isfinite().all()

    weights = next(path for path in released.glob("*.safetensors") if any("vision" in key for key in load_file(path)))
    changed = load_file(weights)
    key = next(key for key in changed if "vision" in key)
    changed[key] = changed[key] + 1
    save_file(changed, weights, metadata={"format": "pt"})
    config = json.loads((released / "config.json").read_text())
    (released / "config.json").write_text(json.dumps({**config, "image_token_index": 8}))
    failed = {check.name: check.found for check in verify_files(checkpoint.path, released).checks if not check.passed}
    assert failed["the rest of the multimodal model is the source's"] == key
    assert "image_token_index of the whole model" in failed["config.json says what the source's says"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings False, and True in text_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"text_config": {"model_type": "llama"}}, "model_type 'llama' in a Gemma3ForConditionalGeneration"),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "Llama4ForConditionalGeneration"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], word: str, multimodal: MakeFolder) -> None:
    folder = multimodal("gemma3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(RequestError) as caught:
        read_shape(folder)
    assert word in str(caught.value)


def test_a_model_without_its_rest_and_with_new_tokens_is_refused(multimodal: MakeFolder, tmp_path: Path) -> None:
    source = multimodal("gemma3")
    with pytest.raises(RequestError, match="tokens for a multimodal model"):
        convert(source, tmp_path / "added", Options(new_tokens=(NewToken("<a>", "mean", False),)))
    convert(source, tmp_path / "nemo")
    (tmp_path / "nemo" / HF_SOURCE / CARRIED_NAME).unlink()
    with pytest.raises(RequestError, match="no tensors but those of its text model"):
        convert(tmp_path / "nemo", tmp_path / "released")
    convert(tmp_path / "nemo", tmp_path / "released", Options(hf_folder=source))
    assert tensors(tmp_path / "released").keys() == tensors(source).keys()
    assert read_config(tmp_path / "released")["architectures"] == ["Gemma3ForCausalLM"]
