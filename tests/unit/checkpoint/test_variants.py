"""Checkpoints as other tools and other versions of Megatron write them are read; contradictions are refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.formats.torch_dist import FORMAT
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.errors import PretrainkitError

Change = Callable[[dict[str, Any]], dict[str, Any]]


def rewrite_ranks(folder: Path, change: Change) -> None:
    """Load the `model` of every rank of a classic checkpoint, change it, save it with torch."""
    for path in folder.rglob("model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        state["model"] = change(state["model"])
        torch.save(state, path)


def without_extra_states(model: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in model.items() if "_extra_state" not in name}


def filled_extra_states(model: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.ones(3, dtype=torch.uint8) if tensor is None else tensor for name, tensor in model.items()}


def local_norms(model: dict[str, Any]) -> dict[str, Any]:
    """As --transformer-impl local has them."""
    names = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    return {re.sub("|".join(names), lambda match: names[match[0]], name): value for name, value in model.items()}


def sequential_experts(model: dict[str, Any]) -> dict[str, Any]:
    pattern = re.compile(r"experts\.(linear_fc[12])\.weight(\d+)$")
    return {pattern.sub(r"experts.local_experts.\2.\1.weight", name): value for name, value in model.items()}


def grouped_experts(model: dict[str, Any]) -> dict[str, Any]:
    """As GroupedMLP keeps them: views [experts, in, out] of one tensor per matrix."""
    pattern = re.compile(r"(.*experts\.)linear_fc([12])\.weight(\d+)$")
    experts: dict[tuple[str, str], dict[int, Any]] = {}
    changed = {}
    for name, tensor in model.items():
        if match := pattern.match(name):
            experts.setdefault((match[1], match[2]), {})[int(match[3])] = tensor
        else:
            changed[name] = tensor
    for (prefix, matrix), tensors in experts.items():
        stacked = torch.stack([tensors[i].T for i in range(len(tensors))])
        hidden = 64
        shape = (hidden, -1) if matrix == "1" else (-1, hidden)
        changed[f"{prefix}weight{matrix}"] = stacked.reshape(shape)
    return changed


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", without_extra_states),
        ("llama", filled_extra_states),
        ("llama", local_norms),
        ("qwen3-moe", local_norms),
        ("mixtral", sequential_experts),
        ("mixtral", grouped_experts),
        ("qwen2-moe", grouped_experts),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_classic_checkpoint_in_other_spellings(
    make_model: Callable[..., Path],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
    name: str,
    change: Change,
) -> None:
    source = make_model(name, dtype="bfloat16")  # for which experts are written as TEGroupedMLP has them
    cut = Parallelism(2, 2, 2 if name != "llama" else 1)
    convert(source, tmp_path / "m", Options(to=CheckpointFormat.TORCH, parallelism=cut))
    rewrite_ranks(tmp_path / "m", change)
    convert(tmp_path / "m", tmp_path / "back")
    assert_same(source, tmp_path / "back")


def test_interleaved_stages(
    make_model: Callable[..., Path], assert_same: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    """Four layers over two stages of two chunks: stage 0 holds layers 0 and 2, stage 1 holds 1 and 3."""
    source = make_model("llama")
    convert(source, tmp_path / "m", Options(to=CheckpointFormat.TORCH, parallelism=Parallelism(1, 4)))
    ranks = sorted((tmp_path / "m" / "release").iterdir())
    states = [torch.load(rank / "model_optim_rng.pt", weights_only=False) for rank in ranks]
    for rank in ranks[2:]:
        shutil.rmtree(rank)
    for stage in range(2):
        state = {key: value for key, value in states[stage].items() if key != "model"}
        state |= {"model0": states[stage]["model"], "model1": states[stage + 2]["model"]}
        torch.save(state, ranks[stage] / "model_optim_rng.pt")
    convert(tmp_path / "m", tmp_path / "back")
    assert_same(source, tmp_path / "back")


def test_optimizer_and_random_states_are_left_out_and_reported(
    make_model: Callable[..., Path], assert_same: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    source = make_model("llama")
    convert(source, tmp_path / "m", Options(to=CheckpointFormat.TORCH, iteration=7))
    path = tmp_path / "m/iter_0000007/mp_rank_00/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state |= {"optimizer": {"state": {0: torch.ones(5)}}, "rng_state": [{"np": (1, 2)}]}
    state["args"].world_size = 64
    torch.save(state, path)
    report = convert(tmp_path / "m", tmp_path / "back")
    assert any("optimizer" in note and "rng_state" in note for note in report.notes)
    assert_same(source, tmp_path / "back")


def test_arguments_are_not_needed(
    make_model: Callable[..., Path], assert_same: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    source = make_model("qwen2")
    convert(source, tmp_path / "m", Options(to=CheckpointFormat.TORCH, parallelism=Parallelism(2)))
    for path in (tmp_path / "m").rglob("*.pt"):
        torch.save({"model": torch.load(path, weights_only=False)["model"]}, path)
    convert(tmp_path / "m", tmp_path / "back")
    assert_same(source, tmp_path / "back")


def another_norm_on_one_rank(model: dict[str, Any]) -> dict[str, Any]:
    model["decoder.final_layernorm.weight"] += torch.rand(())
    return model


def another_output_layer(model: dict[str, Any]) -> dict[str, Any]:
    if "output_layer.weight" in model:
        model["output_layer.weight"] += 1
    return model


def another_dtype_on_one_rank(model: dict[str, Any]) -> dict[str, Any]:
    """Changes the rank that holds the padding rows at the end, which are zeros."""
    name = "embedding.word_embeddings.weight"
    return model if model[name][-1].any() else {**model, name: model[name].double()}


def one_tensor_too_many(model: dict[str, Any]) -> dict[str, Any]:
    return {**model, "decoder.layers.0.self_attention.gate.weight": torch.ones(3)}


def one_tensor_too_few(model: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in model.items() if name != "decoder.layers.0.mlp.linear_fc2.weight"}


@pytest.mark.parametrize(
    ("change", "cut", "words"),
    [
        (another_norm_on_one_rank, Parallelism(2), ["final_layernorm", "ranks"]),
        (another_dtype_on_one_rank, Parallelism(2), ["word_embeddings", "dtypes"]),
        (another_output_layer, Parallelism(1, 2), ["output layer", "tied"]),
        (one_tensor_too_many, Parallelism(), ["self_attention.gate.weight"]),
        (one_tensor_too_few, Parallelism(), ["layers.0.mlp.linear_fc2.weight", "missing"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_contradictions_are_refused(
    make_model: Callable[..., Path], tmp_path: Path, change: Change, cut: Parallelism, words: list[str]
) -> None:
    convert(make_model("llama-tied"), tmp_path / "m", Options(to=CheckpointFormat.TORCH, parallelism=cut))
    rewrite_ranks(tmp_path / "m", change)
    with pytest.raises(PretrainkitError) as caught:
        convert(tmp_path / "m", tmp_path / "back")
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "back").exists()


def test_old_checkpoint_versions_are_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    convert(make_model("llama"), tmp_path / "m", Options(to=CheckpointFormat.TORCH))
    path = next((tmp_path / "m").rglob("*.pt"))
    torch.save({**torch.load(path, weights_only=False), "checkpoint_version": 1.0}, path)
    with pytest.raises(PretrainkitError, match=r"version 1\.0"):
        convert(tmp_path / "m", tmp_path / "back")


def change_context(folder: Path, absent: list[str], class_name: str | None, changes: dict[str, Any]) -> None:
    """Take fields out of the model's config in a NeMo context, name another class, add fields."""
    path = folder / "context" / "io.json"
    context = json.loads(path.read_text())
    (config,) = (node for node in context["objects"].values() if "<root>.model.config" in node["paths"])
    left_out = [f"Attr(name={name!r})" for name in absent]
    config["items"] = [[name, node] for name, node in config["items"] if name not in left_out]
    for name, value in changes.items():
        config["items"].append([f"Attr(name={name!r})", {"type": "leaf", "value": value, "paths": []}])
    if class_name:
        config["metadata"]["items"][0][1]["name"] = class_name
    path.write_text(json.dumps(context))


@pytest.mark.parametrize(
    ("name", "absent", "class_name", "changes", "words"),
    [
        ("llama3-rope", ["old_context_len"], None, {}, ""),
        (
            "llama3-rope",
            ["scale_factor"],
            None,
            {},
            "scale_factor is 8.0 in the checkpoint and 32.0 by config.json (not stored",
        ),
        ("llama3-rope", [], "Llama3Config", {"scale_factor": None}, "scale_factor is None in the checkpoint and 32.0"),
        ("llama", [], "Llama31Config", {}, "scale_factor is 8.0 in the checkpoint and None by config.json (not"),
        ("qwen2", [], None, {"scale_factor": 8.0}, "scale_factor is 8.0 in the checkpoint and None"),
        (
            "mistral",
            ["window_size"],
            None,
            {},
            "window_size is [4096, 0] in the checkpoint and None by config.json (not",
        ),
        (
            "qwen2",
            ["rotary_base"],
            None,
            {},
            "rotary_base is 1000000 in the checkpoint and 10000.0 by config.json (not",
        ),
        (
            "qwen3-moe",
            ["moe_router_topk"],
            None,
            {},
            "moe_router_topk is 8 in the checkpoint and 2 by config.json (not",
        ),
        ("mixtral", ["moe_router_topk", "num_moe_experts"], None, {}, ""),
        ("mixtral", [], None, {"moe_router_pre_softmax": True}, "moe_router_pre_softmax is True"),
        ("llama", [], None, {"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ("qwen2", ["rotary_base"], "ClassOfALab", {}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_absent_setting_of_a_nemo_context_has_the_default_of_its_class(
    make_model: Callable[..., Path],
    tmp_path: Path,
    name: str,
    absent: list[str],
    class_name: str | None,
    changes: dict[str, Any],
    words: str,
) -> None:
    convert(make_model(name), tmp_path / "m")
    change_context(tmp_path / "m", absent, class_name, changes)
    if not words:
        convert(tmp_path / "m", tmp_path / "out")
        return
    with pytest.raises(PretrainkitError) as caught:
        convert(tmp_path / "m", tmp_path / "out")
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", [CheckpointFormat.TORCH, CheckpointFormat.TORCH_DIST], ids=str)
@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama3-rope", {"use_rope_scaling": "absent"}, "use_rope_scaling is None in the checkpoint and True by"),
        ("llama3-rope", {"rope_scaling_factor": 8.0}, "rope_scaling_factor is 8.0 in the checkpoint and 32.0"),
        ("qwen2", {"use_rope_scaling": True}, "use_rope_scaling is True in the checkpoint and False"),
        (
            "qwen2-moe",
            {"moe_router_pre_softmax": "absent"},
            "moe_router_pre_softmax is None in the checkpoint and True by",
        ),
        ("llama", {"rotary_percent": 0.25}, "rotary_percent is 0.25 in the checkpoint and 1.0"),
        ("llama", {"qk_layernorm": "absent", "rotary_interleaved": "absent"}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_absent_argument_of_megatron_lm_is_off(
    make_model: Callable[..., Path],
    tmp_path: Path,
    kind: CheckpointFormat,
    name: str,
    changes: dict[str, Any],
    words: str,
) -> None:
    convert(make_model(name), tmp_path / "m", Options(to=kind))
    (path,) = (tmp_path / "m").glob("release/**/*.pt")
    state = torch.load(path, weights_only=False)
    for argument, value in changes.items():
        if value == "absent":
            delattr(state["args"], argument)
        else:
            setattr(state["args"], argument, value)
    torch.save(state, path)
    if not words:
        convert(tmp_path / "m", tmp_path / "out")
        return
    with pytest.raises(PretrainkitError) as caught:
        convert(tmp_path / "m", tmp_path / "out")
    assert words in str(caught.value)


def save_distributed(tensors: dict[str, Any], folder: Path) -> None:
    """Write tensors with torch.distributed.checkpoint itself, as the distributed format asks for it."""
    from torch.distributed import checkpoint

    checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps(FORMAT))
    torch.save({}, folder / "common.pt")


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("split_gate", [False, True], ids=["gate-and-up-together", "gate-and-up-apart"])
def test_distributed_checkpoint_with_layers_and_experts_of_their_own(
    make_model: Callable[..., Path],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
    name: str,
    split_gate: bool,
) -> None:
    source = make_model(name, dtype="bfloat16")
    convert(source, tmp_path / "m", Options(to=CheckpointFormat.TORCH))
    model = torch.load(tmp_path / "m/release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    tensors = {}
    for key, tensor in without_extra_states(model).items():
        key = re.sub(r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.experts.\2.\1.weight", key)
        if split_gate and key.endswith("linear_fc1.weight"):
            tensors[f"{key}_w"], tensors[f"{key}_v"] = (part.clone() for part in tensor.chunk(2))
        else:
            tensors[key] = tensor
    tensors["optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc2.weight"] = torch.ones(4)
    save_distributed(tensors, tmp_path / "td")
    report = convert(tmp_path / "td", tmp_path / "back", Options(hf_folder=source))
    assert report.source_kind == "torch_dist"
    assert any("optimizer" in note for note in report.notes)
    assert_same(source, tmp_path / "back")


def test_distributed_checkpoint_with_layers_of_their_own_and_experts_stacked(
    make_model: Callable[..., Path], assert_same: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    """As megatron-core keeps models whose layers are not all alike (moe_layer_freq)."""
    source = make_model("mixtral", dtype="bfloat16")
    convert(source, tmp_path / "m", Options(to=CheckpointFormat.TORCH))
    model = torch.load(tmp_path / "m/release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    tensors: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for key, tensor in without_extra_states(model).items():
        if match := re.match(r"(.*experts\.)(linear_fc[12]\.weight)(\d+)$", key):
            experts.setdefault(f"{match[1]}experts.{match[2]}", {})[int(match[3])] = tensor
        else:
            tensors[key] = tensor
    for key, parts in experts.items():
        tensors[key] = torch.stack([parts[i] for i in range(8)])
    save_distributed(tensors, tmp_path / "td")
    convert(tmp_path / "td", tmp_path / "back", Options(hf_folder=source))
    assert_same(source, tmp_path / "back")


@pytest.mark.parametrize(("dtype", "grouped"), [("bfloat16", True), ("float32", False), ("float16", False)])
def test_experts_are_those_of_the_expert_module_that_megatron_allows(
    make_model: Callable[..., Path], tmp_path: Path, dtype: str, grouped: bool
) -> None:
    """Megatron-LM asserts bf16 for --moe-grouped-gemm, which --use-checkpoint-args takes from the checkpoint."""
    convert(make_model("qwen3-moe", dtype=dtype), tmp_path / "m", Options(to=CheckpointFormat.TORCH))
    state = torch.load(tmp_path / "m/release/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert state["args"].moe_grouped_gemm == grouped
    name = "linear_fc1.weight3" if grouped else "local_experts.3.linear_fc1.weight"
    assert f"decoder.layers.0.mlp.experts.{name}" in state["model"]
    convert(make_model("llama", dtype=dtype), tmp_path / "dense", Options(to=CheckpointFormat.TORCH))
    dense = torch.load(tmp_path / "dense/release/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert not hasattr(dense["args"], "moe_grouped_gemm")


@pytest.mark.parametrize("both", [False, True], ids=["local", "both"])
def test_norms_of_the_local_layer_spec_are_read(
    make_model: Callable[..., Path], assert_same: Callable[[Path, Path], None], tmp_path: Path, both: bool
) -> None:
    """Without Transformer Engine megatron-core saves the norm before experts under a dense layer's name."""
    source = make_model("mixtral", dtype="bfloat16")
    convert(source, tmp_path / "m", Options(to=CheckpointFormat.TORCH))
    model = torch.load(tmp_path / "m/release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    tensors = {
        re.sub(r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.experts.\2.\1.weight", key): tensor
        for key, tensor in without_extra_states(model).items()
    }
    for key in [key for key in tensors if key.endswith(".pre_mlp_layernorm.weight")]:
        norm = tensors[key] if both else tensors.pop(key)
        tensors[key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")] = norm
    save_distributed(tensors, tmp_path / "td")
    convert(tmp_path / "td", tmp_path / "back", Options(hf_folder=source))
    assert_same(source, tmp_path / "back")
    if both:
        tensors["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"] = norm + 1
        save_distributed(tensors, tmp_path / "other")
        with pytest.raises(PretrainkitError, match=r"layers\.1\.mlp\.linear_fc1\.layer_norm_weight and .* differ"):
            convert(tmp_path / "other", tmp_path / "out", Options(hf_folder=source))


def test_megatron_core_reads_what_is_written(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """torch.distributed.checkpoint loads ours: names, shapes, padded rows, values."""
    from safetensors.torch import load_file
    from torch.distributed import checkpoint

    source = make_model("llama-tied")
    convert(source, tmp_path / "m", Options(to=CheckpointFormat.TORCH_DIST, workers=3))
    expected = load_file(source / "model.safetensors")
    state = {
        "embedding.word_embeddings.weight": torch.empty(384, 64),
        "decoder.layers.mlp.linear_fc1.weight": torch.empty(4, 256, 64),
    }
    checkpoint.load(state, checkpoint_id=tmp_path / "m" / "release", no_dist=True)
    embedding = state["embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:263], expected["model.embed_tokens.weight"]) and not embedding[263:].any()
    for layer in range(4):
        gate, up = (expected[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        assert torch.equal(state["decoder.layers.mlp.linear_fc1.weight"][layer], torch.cat([gate, up]))
    common = torch.load(tmp_path / "m/release/common.pt", weights_only=False)
    assert common["args"].num_layers == 4 and common["args"].padded_vocab_size == 384
    assert common["checkpoint_version"] == 3.0


def test_router_bias_is_never_cast(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family with a router bias in fp32 (its table says keep_dtype): bit-equal through a cast to bf16 and back."""
    from dataclasses import replace

    from safetensors.torch import load_file, save_file

    from pretrainkit.models import qwen3_moe, registry
    from pretrainkit.models.family import Layout, Weight

    bias = Weight(
        "decoder.layers.{layer}.mlp.router.expert_bias",
        ("model.layers.{layer}.mlp.gate.e_score_correction_bias",),
        Layout.REPLICATED,
        ((8,),),
        keep_dtype=True,
    )
    family = replace(qwen3_moe.FAMILY, weights=lambda shape: (*qwen3_moe.FAMILY.weights(shape), bias))
    monkeypatch.setattr(registry, "FAMILIES", (family,))
    source = shutil.copytree(make_model("qwen3-moe"), tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    for layer in range(4):
        tensors[bias.hf[0].format(layer=layer)] = torch.full((8,), 1 + 2**-12)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for kind in (CheckpointFormat.NEMO, CheckpointFormat.TORCH):
        convert(source, tmp_path / str(kind), Options(to=kind, dtype=torch.bfloat16))
        convert(tmp_path / str(kind), tmp_path / f"{kind}-back")
        back = load_file(tmp_path / f"{kind}-back" / "model.safetensors")
        assert back["model.embed_tokens.weight"].dtype == torch.bfloat16
        for layer in range(4):
            name = bias.hf[0].format(layer=layer)
            assert torch.equal(back[name], tensors[name]) and back[name].dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3_5-moe", "glm4-moe"])
def test_experts_in_one_tensor_are_those_in_many(name: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    """As transformers 5 holds them: [experts, 2 x F, H] and [experts, H, F]."""
    source = shutil.copytree(make_model(name), tmp_path / "stacked")
    tensors = {key: tensor for path in source.glob("*.safetensors") for key, tensor in load_file(path).items()}
    for path in source.glob("model*.safetensors*"):
        path.unlink()
    expected, stacked = dict(tensors), tensors
    for block in {key.partition(".experts.")[0] for key in expected if ".experts." in key}:
        gate, up, down = (
            [stacked.pop(f"{block}.experts.{expert}.{part}_proj.weight") for expert in range(8)]
            for part in ("gate", "up", "down")
        )
        stacked[f"{block}.experts.gate_up_proj"] = torch.cat((torch.stack(gate), torch.stack(up)), 1)
        stacked[f"{block}.experts.down_proj"] = torch.stack(down)
    save_file(stacked, source / "model.safetensors")
    convert(source, tmp_path / "nemo")
    convert(tmp_path / "nemo", tmp_path / "back")
    found = {
        key: tensor for path in (tmp_path / "back").glob("*.safetensors") for key, tensor in load_file(path).items()
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())
