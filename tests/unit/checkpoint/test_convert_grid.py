"""Every family through every format and layout and back: the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import FEATURED, LATENT_MODELS, MIXTURES, MODELS

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.formats.hf import HfReader
from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.checkpoint.mapping import tensor_mappings
from pretrainkit.checkpoint.open import detect
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.checkpoint.transforms import padded_vocabulary, shard, unshard
from pretrainkit.errors import RequestError
from pretrainkit.models.registry import read_shape

PIPELINES = {"PP1": (1, None, None), "PP2": (2, None, None), "PP3-uneven": (3, 1, 1)}


def layouts() -> list[object]:
    """Families x TP x PP x EP."""
    cases, names = [], [*MODELS, *LATENT_MODELS]
    for name, tensor, (label, (pipeline, first, last)) in itertools.product(names, (1, 2, 4), PIPELINES.items()):
        for expert in {**dict.fromkeys(MIXTURES, (1, 2, 4)), **dict.fromkeys(LATENT_MODELS, (2,))}.get(name, (1,)):
            parallelism = Parallelism(tensor, pipeline, expert, first, last)
            cases.append(pytest.param(name, parallelism, id=f"{name}-TP{tensor}-{label}-EP{expert}"))
    return cases


@pytest.mark.parametrize(("name", "parallelism"), layouts())
def test_classic_checkpoint_comes_back_bit_equal(
    make_model: Callable[..., Path],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
    name: str,
    parallelism: Parallelism,
) -> None:
    source = make_model(name)
    convert(source, tmp_path / "torch", Options(to=CheckpointFormat.TORCH, parallelism=parallelism, workers=2))
    ranks = parallelism.tensor * parallelism.pipeline * parallelism.expert
    assert len(list(tmp_path.glob("torch/release/mp_rank_*/model_optim_rng.pt"))) == ranks
    convert(tmp_path / "torch", tmp_path / "back")
    assert_same(source, tmp_path / "back")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", [CheckpointFormat.NEMO, CheckpointFormat.TORCH_DIST], ids=str)
@pytest.mark.parametrize("name", [*MODELS, *LATENT_MODELS, *FEATURED])
def test_distributed_checkpoint_comes_back_bit_equal(
    make_model: Callable[..., Path],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
    name: str,
    kind: CheckpointFormat,
    workers: int,
) -> None:
    source = make_model(name)
    if kind is CheckpointFormat.TORCH_DIST and name in FEATURED:
        with pytest.raises(RequestError, match=r"Megatron-LM('s arguments)? can't express"):
            convert(source, tmp_path / "megatron", Options(to=kind, workers=workers))
        return
    convert(source, tmp_path / "megatron", Options(to=kind, workers=workers))
    assert detect(tmp_path / "megatron").format is kind
    convert(tmp_path / "megatron", tmp_path / "back", Options(workers=workers, keep_config=True))
    assert_same(source, tmp_path / "back")
    assert (tmp_path / "back/config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("name", FEATURED)
def test_ranks_tensors_are_put_together_again(make_model: Callable[..., Path], name: str) -> None:
    """Of each tensor, cut for TP of 1, 2 and 4; pipeline stages have whole layers."""
    shape = read_shape(make_model(name))
    mappings = tensor_mappings(shape)
    reader = HfReader(make_model(name), mappings, tied=shape.tie_word_embeddings)
    for mapping, size in itertools.product(mappings, (1, 2, 4)):
        parts, groups = reader.read(mapping), shape.num_query_groups
        padded = {"groups": groups, "padded_rows": padded_vocabulary(shape.vocab_size, 128, size)}
        cut = [shard(mapping.layout, parts, rank=rank, size=size, **padded) for rank in range(size)]
        back = unshard(mapping.layout, cut, rows=[rows for rows, *_ in mapping.shapes], groups=groups)
        assert all(torch.equal(*map(LazyTensor.tensor, pair)) for pair in zip(back, parts, strict=True)), str(mapping)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_of_the_source_is_kept(
    make_model: Callable[..., Path], assert_same: Callable[[Path, Path], None], tmp_path: Path, dtype: str
) -> None:
    source = make_model("qwen3", dtype=dtype)
    convert(source, tmp_path / "a", Options(to=CheckpointFormat.TORCH, parallelism=Parallelism(2, 2)))
    convert(tmp_path / "a", tmp_path / "b", Options(to=CheckpointFormat.TORCH_DIST))
    convert(tmp_path / "b", tmp_path / "c", Options(to=CheckpointFormat.NEMO))
    convert(tmp_path / "c", tmp_path / "back")
    assert_same(source, tmp_path / "back")


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_resharding_gives_the_files_that_a_direct_conversion_gives(
    make_model: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    source = make_model(name)
    wanted = Parallelism(4, 2)
    convert(source, tmp_path / "direct", Options(to=CheckpointFormat.TORCH, parallelism=wanted))
    convert(source, tmp_path / "other", Options(to=CheckpointFormat.TORCH, parallelism=Parallelism(2, 3, 1, 1, 1)))
    convert(tmp_path / "other", tmp_path / "resharded", Options(to=CheckpointFormat.TORCH, parallelism=wanted))
    for path in sorted((tmp_path / "direct").rglob("*.pt")):
        direct = torch.load(path, weights_only=False)
        resharded = torch.load(tmp_path / "resharded" / path.relative_to(tmp_path / "direct"), weights_only=False)
        assert direct["args"] == resharded["args"]
        assert direct["model"].keys() == resharded["model"].keys()
        for key, tensor in direct["model"].items():
            assert tensor is resharded["model"][key] or torch.equal(tensor, resharded["model"][key]), key
