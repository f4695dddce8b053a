"""megatron-core's own models, loaded from converted checkpoints, compute what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import convert_ranks
import pytest
import ranks
from hf_models import LATENT_MODELS

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options

pytestmark = pytest.mark.integration


MODELS = ("llama-tied", "llama3-rope", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe", "qwen2-moe")
CASES = [
    *((name, CheckpointFormat.TORCH, Parallelism(2)) for name in MODELS),
    *((name, CheckpointFormat.TORCH_DIST, Parallelism(1)) for name in MODELS),
    ("mixtral", CheckpointFormat.TORCH, Parallelism(1, 1, 2)),
]


@pytest.mark.parametrize(
    ("name", "kind", "cut"), CASES, ids=[f"{name}-{kind}-TP{cut.tensor}-EP{cut.expert}" for name, kind, cut in CASES]
)
def test_megatron_model_gives_the_logits_of_transformers(
    make_model: Callable[..., Path], tmp_path: Path, name: str, kind: CheckpointFormat, cut: Parallelism
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = make_model(name)
    convert(source, tmp_path / "megatron", Options(to=kind, parallelism=cut))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = torch.randint(0, 263, (2, 96), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, tmp_path / "tokens.pt")
    with torch.no_grad():
        expected = model(tokens).logits
    ranks.run_ranks(
        convert_ranks.logits_rank,
        cut.tensor * cut.expert,
        tmp_path,
        hf_folder=source,
        checkpoint=tmp_path / "megatron",
        kind=str(kind),
        expert=cut.expert,
        tokens_file=tmp_path / "tokens.pt",
        local_norms=name == "mixtral",
    )
    logits = torch.load(tmp_path / "logits.pt")
    assert expected.std() > 0.1  # random weights that say something
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", LATENT_MODELS)
def test_megatrons_own_latent_attention_with_the_stored_arguments_gives_the_logits_of_transformers(
    make_model: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = make_model(name)
    convert(source, tmp_path / "megatron", Options(to=CheckpointFormat.TORCH_DIST))
    tokens = torch.randint(0, 263, (2, 96), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, tmp_path / "tokens.pt")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(tokens).logits
    files = {"checkpoint": tmp_path / "megatron", "tokens_file": tmp_path / "tokens.pt"}
    ranks.run_ranks(convert_ranks.latent_logits_rank, 1, tmp_path, **files)
    assert expected.std() > 0.1
    assert (torch.load(tmp_path / "logits.pt") - expected).abs().max() < 1e-4
