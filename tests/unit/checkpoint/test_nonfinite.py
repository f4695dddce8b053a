"""NaN and infinities are found in whatever a conversion moves, and in the padding rows that it removes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.mapping import tensor_mappings
from pretrainkit.checkpoint.nonfinite import describe_padding, is_finite
from pretrainkit.checkpoint.open import detect, open_reader
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.errors import CheckpointError
from pretrainkit.models.registry import read_shape

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
]
PLANTED = {
    "model.layers.1.self_attn.o_proj.weight": float("nan"),
    "model.layers.2.self_attn.k_proj.weight": float("-inf"),
    "model.layers.3.input_layernorm.weight": float("nan"),
    "model.embed_tokens.weight": float("inf"),
}
"""One value in tensors of every layout."""


def buffer(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_that_is_not_finite_is_seen_and_no_other(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    tensor = torch.randn(1000).to(dtype)
    for value in (limits.max, limits.min, limits.smallest_normal, -0.0):
        tensor[7] = value
        assert is_finite(buffer(tensor), dtype)
    negative = torch.tensor([-1.0]).to(dtype).view(torch.uint8)[-1] & 0x80
    for value in (float("nan"), float("inf"), float("-inf")):
        tensor[7] = value
        if torch.isfinite(tensor.float()).all():
            continue  # a format without infinities
        assert not is_finite(buffer(tensor), dtype)
        tensor.view(torch.uint8)[7 * dtype.itemsize + dtype.itemsize - 1] ^= negative  # the sign
        assert not is_finite(buffer(tensor), dtype)
    assert is_finite(buffer(torch.tensor([-1])), torch.int64)


@pytest.fixture(scope="module")
def source(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the values of PLANTED."""
    folder = shutil.copytree(make_model("llama"), tmp_path_factory.mktemp("planted") / "hf")
    tensors = load_file(folder / "model.safetensors")
    for name, value in PLANTED.items():
        tensors[name].reshape(-1)[5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", CheckpointFormat, ids=str)
def test_weights_that_are_not_finite_are_refused_unless_they_are_allowed(
    source: Path, tmp_path: Path, weights: Callable[[Path], dict[str, Any]], kind: CheckpointFormat
) -> None:
    options = {"to": kind, "parallelism": Parallelism(2), "workers": 2}
    with pytest.raises(CheckpointError, match="--allow-nonfinite") as caught:
        convert(source, tmp_path / "out", Options(**options))
    counts = [f"{name} (1 {'NaN' if value != value else 'infinite'})" for name, value in PLANTED.items()]
    assert all(count in str(caught.value) for count in counts)
    assert not list(tmp_path.iterdir())
    report = convert(source, tmp_path / "out", Options(**options, allow_nonfinite=True))
    assert all(count in report.notes[-1] for count in counts)
    with pytest.raises(CheckpointError, match="--allow-nonfinite"):
        convert(tmp_path / "out", tmp_path / "back")
    convert(tmp_path / "out", tmp_path / "back", Options(CheckpointFormat.HF, allow_nonfinite=True))
    before, after = weights(source), weights(tmp_path / "back")
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)


def test_a_cast_that_overflows_is_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(make_model("llama"), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = 1e5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    convert(folder, tmp_path / "bf16", Options(dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \(1 infinite\)"):
        convert(folder, tmp_path / "fp16", Options(dtype=torch.float16))


@pytest.mark.parametrize("kind", [CheckpointFormat.TORCH, CheckpointFormat.TORCH_DIST], ids=str)
def test_padding_rows_that_are_removed_are_described(
    make_model: Callable[..., Path], tmp_path: Path, kind: CheckpointFormat
) -> None:
    convert(make_model("llama"), tmp_path / "m", Options(to=kind))
    clean = convert(tmp_path / "m", tmp_path / "clean")
    assert "121 padding rows of output_layer.weight removed: zeros" in clean.notes
    found = detect(tmp_path / "m")
    shape = read_shape(found.root / "hf_source")
    mappings = tensor_mappings(shape)
    padding = open_reader(found, mappings, shape).padding(mappings[0])
    assert padding
    place = padding.blocks[0]

    def plant(*values: float) -> None:
        with place.path.open("r+b") as file:
            file.seek(place.begin)
            file.write(buffer(torch.tensor(values)))

    plant(1e-39, 0.5)
    (note,) = (note for note in convert(tmp_path / "m", tmp_path / "odd").notes if "embedding" in note)
    assert note.endswith("removed: 1 not zero, largest value 0.5, 1 denormal")
    plant(float("nan"), float("inf"))
    with pytest.raises(CheckpointError, match=r"padding rows of embedding.word_embeddings.weight \(1 NaN, 1 infinite"):
        convert(tmp_path / "m", tmp_path / "refused")
    allowed = convert(tmp_path / "m", tmp_path / "allowed", Options(allow_nonfinite=True))
    assert "padding rows of embedding" in allowed.notes[-1]


def test_padding_rows_without_a_finite_value_are_described() -> None:
    assert describe_padding(torch.full((2, 3), float("nan"))) == "2 not zero"
