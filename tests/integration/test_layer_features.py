"""Families whose layers have more than Llama's: Megatron-core's model computes and trains what transformers has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import convert_ranks
import pytest
import ranks
import torch
from hf_models import FEATURED
from safetensors.torch import load_file

from pretrainkit.checkpoint.convert import convert
from pretrainkit.config.schema import Recompute
from pretrainkit.run import checkpoints

pytestmark = pytest.mark.integration
NAMES = (*FEATURED, "phi3", "seed-oss")
CHECKED = ("gemma3", "apertus", "deepseek-v2-lite")
"""Models whose initial loss is compared with that of transformers here; logits are compared of all."""
ALIKE = (
    "granite4",
    "glm4-moe",
    "qwen3_5-moe",
    "llama-biases",
    "mistral-window",
    "qwen3-yarn",
    "llama-dynamic",
    "deepseek-v2",
)
"""Models that are not trained here: each of their features is another model's, too."""


@pytest.mark.parametrize(("name", "length"), [*((name, 96) for name in NAMES), ("phi3-longrope", 64)])
def test_the_logits_of_two_ranks_are_those_of_transformers(
    name: str, length: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = make_model(name)
    convert(source, tmp_path / "nemo")
    tokens = torch.randint(0, 263, (2, length), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, tmp_path / "tokens.pt")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(tokens).logits
    files = {"checkpoint": tmp_path / "nemo", "tokens_file": tmp_path / "tokens.pt"}
    ranks.run_ranks(convert_ranks.nemo_logits_rank, 2, tmp_path, hf_folder=source, **files)
    assert expected.std() > 0.1  # random weights that say something
    assert (torch.load(tmp_path / "logits.pt") - expected).abs().max() < 1e-4


def prepared(name: str, make_model: Callable[..., Path], tokenizer_folder: Path, folder: Path) -> dict[str, Path]:
    """A random model with a tokenizer, and its conversion, to start a run from."""
    source = shutil.copytree(make_model(name, vocab_size=320, pad_token_id=2), folder / "hf")
    shutil.copytree(tokenizer_folder, source, dirs_exist_ok=True)
    convert(source, folder / "initial")
    return {"initial_checkpoint": folder / "initial", "hf_weights": source}


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def assert_same_losses(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Those of the first step; later ones but for what Adam makes of gradients that are hardly more than rounding."""
    assert losses(found)[0] == pytest.approx(losses(expected)[0], abs=5e-6)
    assert losses(found) == pytest.approx(losses(expected), abs=2e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALIKE])
def test_ranks_train_what_one_rank_trains(
    name: str,
    make_model: Callable[..., Path],
    tokenizer_folder: Path,
    tmp_path: Path,
    train_tiny: Callable[..., list[dict[str, Any]]],
) -> None:
    """At TP=2 and PP=2: the losses, and every weight after three steps."""
    start = prepared(name, make_model, tokenizer_folder, tmp_path)
    if name not in CHECKED:
        del start["hf_weights"]
    one = train_tiny(tmp_path / "hf", "one", max_steps=3, **start)
    (parity,) = (record for record in one if record.get("event") == "start_parity")
    assert parity["result"] == ("passed" if name in CHECKED else "skipped"), parity
    start.pop("hf_weights", None)
    layout = {"tensor": 2, "pipeline": 2, "sequence_parallel": name != "qwen3_5"}
    spread = train_tiny(tmp_path / "hf", "spread", max_steps=3, **layout, **start)
    assert_same_losses(spread, one)
    found = {}
    for run in ("one", "spread"):
        checkpoint = checkpoints.newest_complete(tmp_path / run / "checkpoints")
        assert checkpoint and checkpoint.step == 3
        convert(checkpoint.path, tmp_path / f"hf_{run}")
        found[run] = load_file(tmp_path / f"hf_{run}" / "model.safetensors")
    before = load_file(tmp_path / "hf" / "model.safetensors")
    assert found["one"].keys() == found["spread"].keys() == before.keys()
    for weight, tensor in before.items():
        change = (found["one"][weight] - tensor).norm()
        if weight.endswith("layer_scalar"):  # which no training changes
            assert torch.equal(found["spread"][weight], tensor) and not change
            continue
        assert change > 1e-4 or weight.endswith(("act_fn.beta", "act_fn.eps")), weight  # xIELU's constants
        # Attention hardly depends on the bias of keys: most of its gradient is rounding.
        limit = 0.3 if weight.endswith("k_proj.bias") else 0.05
        assert (found["spread"][weight] - found["one"][weight]).norm() <= limit * change, weight


LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("olmo2", "TP=2", {"tensor": 2}),
    ("glm4", "TP=2", {"tensor": 2}),
    ("apertus", "TP=2", {"tensor": 2}),
    ("gemma2", "CP=2", {"context": 2}),
    ("olmo3", "CP=2", {"context": 2}),
    ("ministral3", "CP=2", {"context": 2}),
    ("phi3-longrope", "CP=2", {"context": 2}),
    ("gemma3", "recomputed", {"recompute": Recompute("full", 4)}),
    ("gpt-oss", "CP=2", {"context": 2}),
    ("qwen3-next", "EP=2, recomputed", {"data_parallel": 2, "expert": 2, "recompute": Recompute("full", 4)}),
    ("deepseek-v3", "CP=2", {"context": 2}),
    ("gemma4", "CP=2", {"context": 2}),
    ("llama4", "CP=2, recomputed", {"context": 2, "recompute": Recompute("full", 4)}),
    ("llama4", "EP=2", {"data_parallel": 2, "expert": 2}),
    ("deepseek-v3", "EP=2", {"data_parallel": 2, "expert": 2}),
    ("deepseek-v3", "recomputed", {"recompute": Recompute("full", 4)}),
    ("gpt-oss", "EP=2", {"data_parallel": 2, "expert": 2}),
    ("gpt-oss", "EP=2, TP=2", {"tensor": 2, "sequence_parallel": True, "expert": 2}),
]


@pytest.mark.parametrize(("name", "words", "layout"), LAYOUTS, ids=[f"{name}-{words}" for name, words, _ in LAYOUTS])
def test_other_layouts_train_what_one_rank_trains(
    name: str,
    words: str,
    layout: dict[str, Any],
    make_model: Callable[..., Path],
    tokenizer_folder: Path,
    tmp_path: Path,
    train_tiny: Callable[..., list[dict[str, Any]]],
) -> None:
    """Tensor parallelism without sequence parallelism, context parallelism, and layers that are computed again."""
    start = prepared(name, make_model, tokenizer_folder, tmp_path)
    del start["hf_weights"]
    one, other = (
        train_tiny(tmp_path / "hf", run, max_steps=2, **settings, **start)
        for run, settings in (("one", {}), ("other", layout))
    )
    assert_same_losses(other, one)
    norms = [[record["grad_norm"] for record in records if "loss" in record] for records in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    routers = [[record["router"] for record in records if "router" in record] for records in (one, other)]
    for found, expected in zip(*routers, strict=True):
        assert found == pytest.approx(expected, rel=0.02, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("granite", "residual_multiplier", 0.25),
        ("gemma3", "sliding_window", 24),
        ("gemma4", "sliding_window", 24),
        ("llama4", "attention_chunk_size", 16),
        ("smollm3", "no_rope_layers", [1] * 4),
        ("deepseek-v3", "topk_group", 1),
    ],
)
def test_a_start_whose_original_has_another_setting_is_refused(
    name: str,
    field: str,
    value: Any,
    make_model: Callable[..., Path],
    tokenizer_folder: Path,
    tmp_path: Path,
    train_tiny: Callable[..., list[dict[str, Any]]],
) -> None:
    """The setting is what transformers computes with; no name and no shape of a tensor shows it."""
    start = prepared(name, make_model, tokenizer_folder, tmp_path)
    original = shutil.copytree(start["hf_weights"], tmp_path / "original")
    config = json.loads((original / "config.json").read_text())
    assert field in config
    (original / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(AssertionError, match=r"CheckpointError: .*the loaded model is not that of"):
        train_tiny(start["hf_weights"], "run", max_steps=1, **{**start, "hf_weights": original})
