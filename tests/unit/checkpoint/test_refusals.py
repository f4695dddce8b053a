"""What can't be converted is refused with exit code 2 or 1, by name, and nothing is left behind."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.errors import CheckpointError, PretrainkitError


def refused(source: Path, target: Path, options: Options | None = None) -> str:
    """The message with which a conversion is refused; the target's folder must stay as it was."""
    before = sorted(target.parent.iterdir())
    with pytest.raises(PretrainkitError) as caught:
        convert(source, target, options)
    assert sorted(target.parent.iterdir()) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (Parallelism(tensor=8), ["4 key/value heads", "by 8", "one of 1, 2, 4"]),
        (Parallelism(tensor=3), ["8 attention heads", "4 key/value heads"]),
        (Parallelism(tensor=0), ["attention heads"]),
        (Parallelism(pipeline=3), ["4 layers", "3 stages", "1, 2, 4", "--target-first-stage-layers"]),
        (Parallelism(pipeline=2, first_stage_layers=4), ["4 layers", "0 left"]),
        (Parallelism(pipeline=2, first_stage_layers=1, last_stage_layers=1), ["4 layers"]),
        (Parallelism(expert=2), ["no experts"]),
    ],
    ids=["TP-kv", "TP-heads", "TP0", "PP", "PP-first", "PP-sum", "EP-dense"],
)
def test_layout_that_does_not_fit(
    make_model: Callable[..., Path], tmp_path: Path, cut: Parallelism, words: list[str]
) -> None:
    message = refused(make_model("llama"), tmp_path / "out", Options(to=CheckpointFormat.TORCH, parallelism=cut))
    assert all(word in message for word in words), message


def test_experts_that_do_not_divide(make_model: Callable[..., Path], tmp_path: Path) -> None:
    message = refused(
        make_model("mixtral"), tmp_path / "out", Options(to=CheckpointFormat.TORCH, parallelism=Parallelism(expert=3))
    )
    assert "8 experts" in message and "1, 2, 4, 8" in message


@pytest.mark.parametrize("cut", [Parallelism(pipeline=2, first_stage_layers=3), Parallelism(1, 3, 1, 1, 1)])
def test_uneven_stages_hold_all_layers(cut: Parallelism) -> None:
    stages = cut.stages(5)
    assert [layer for stage in stages for layer in stage] == [0, 1, 2, 3, 4]
    assert len(stages) == cut.pipeline


def change_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def extra_tensor(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.g_proj.weight"] = tensors["model.norm.weight"].clone()


def missing_tensor(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"]


def misshapen_tensor(tensors: dict[str, Any]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"][:-1].contiguous()


def mixed_dtypes(tensors: dict[str, Any]) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].bfloat16()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (mixed_dtypes, ["model.layers.1.self_attn.k_proj.weight", "torch.bfloat16", "torch.float32"]),
        (extra_tensor, ["not known", "model.layers.0.self_attn.g_proj.weight"]),
        (missing_tensor, ["missing", "model.layers.2.mlp.up_proj.weight"]),
        (misshapen_tensor, ["[127, 64]", "[128, 64]", "model.layers.2.mlp.up_proj.weight"]),
    ],
    ids=["mixed", "extra", "missing", "misshapen"],
)
def test_tensors_that_do_not_fit(
    make_model: Callable[..., Path], tmp_path: Path, change: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    source = shutil.copytree(make_model("llama"), tmp_path / "hf")
    change_weights(source, change)
    message = refused(source, tmp_path / "out")
    assert all(word in message for word in words), message


def test_vocabulary_rows_that_config_does_not_say(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source = shutil.copytree(make_model("llama"), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 264}))
    assert "[263, 64]" in refused(source, tmp_path / "out")


def test_tied_head_that_differs_is_refused_and_an_equal_one_is_dropped(
    make_model: Callable[..., Path], assert_same: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    source = shutil.copytree(make_model("llama-tied"), tmp_path / "hf")
    change_weights(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    convert(source, tmp_path / "nemo")
    convert(tmp_path / "nemo", tmp_path / "back")
    assert_same(make_model("llama-tied"), tmp_path / "back")
    change_weights(source, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    assert "tie_word_embeddings" in refused(source, tmp_path / "out")


def cut_file(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def remove_file(folder: Path) -> None:
    min(folder.glob("*.safetensors")).unlink()


def ghost(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = min(folder.glob("*.safetensors")).name
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "word"),
    [(cut_file, "cut or damaged"), (remove_file, "missing"), (ghost, "model.layers.9")],
    ids=["cut", "removed", "ghost"],
)
def test_damaged_hugging_face_folder(
    make_model: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], None], word: str
) -> None:
    source = shutil.copytree(make_model("llama", max_shard_size="200KB"), tmp_path / "hf")
    assert len(list(source.glob("*.safetensors"))) > 2
    damage(source)
    assert word in refused(source, tmp_path / "out")


def test_target_is_not_touched_without_overwrite(make_model: Callable[..., Path], tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious").write_text("x")
    assert "--overwrite" in refused(make_model("llama"), target)
    assert (target / "precious").read_text() == "x"
    convert(make_model("llama"), target, Options(overwrite=True))
    assert not (target / "precious").exists() and (target / "weights").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_overwrite_keeps_the_old_folder(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source = shutil.copytree(make_model("llama"), tmp_path / "hf")
    convert(source, tmp_path / "out")
    change_weights(source, missing_tensor)
    refused(source, tmp_path / "out", Options(overwrite=True))
    assert (tmp_path / "out" / "weights" / ".metadata").is_file()


def test_source_is_not_its_own_target(make_model: Callable[..., Path]) -> None:
    source = make_model("llama")
    assert "same folder" in refused(source, source, Options(overwrite=True))


@pytest.mark.parametrize("kind", list(CheckpointFormat)[1:], ids=str)
def test_checkpoint_without_hugging_face_files_needs_them(
    make_model: Callable[..., Path], assert_same: Callable[[Path, Path], None], tmp_path: Path, kind: CheckpointFormat
) -> None:
    source = make_model("llama")
    convert(source, tmp_path / "megatron", Options(to=kind))
    shutil.rmtree(tmp_path / "megatron" / "hf_source")
    assert "--hf-model" in refused(tmp_path / "megatron", tmp_path / "out")
    convert(tmp_path / "megatron", tmp_path / "out", Options(hf_folder=source))
    assert_same(source, tmp_path / "out")


@pytest.mark.parametrize("kind", list(CheckpointFormat)[1:], ids=str)
def test_config_of_another_model_is_refused(
    make_model: Callable[..., Path], tmp_path: Path, kind: CheckpointFormat
) -> None:
    convert(make_model("llama"), tmp_path / "megatron", Options(to=kind))
    for changes in ({"rope_theta": 77.0}, {"num_hidden_layers": 3}, {"vocab_size": 900}):
        with pytest.raises(PretrainkitError):
            convert(tmp_path / "megatron", tmp_path / "out", Options(hf_folder=make_model("llama", **changes)))
        assert not (tmp_path / "out").exists()


def test_empty_and_missing_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(tmp_path / "empty", tmp_path / "out")
    assert "no such folder" in refused(tmp_path / "none", tmp_path / "out")


def test_other_distributed_formats_are_named(make_model: Callable[..., Path], tmp_path: Path) -> None:
    convert(make_model("llama"), tmp_path / "m")
    (tmp_path / "m" / "weights" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "zarr" in refused(tmp_path / "m", tmp_path / "out")
    (tmp_path / "m" / "weights" / "metadata.json").unlink()
    assert "torch_dist" in refused(tmp_path / "m" / "weights", tmp_path / "out")


def test_parent_of_checkpoints_gets_a_hint(make_model: Callable[..., Path], tmp_path: Path) -> None:
    convert(make_model("llama"), tmp_path / "runs" / "step_4")
    message = refused(tmp_path / "runs", tmp_path / "out")
    assert "perhaps you mean" in message and "step_4" in message


def test_one_rank_of_a_checkpoint_gets_a_hint(make_model: Callable[..., Path], tmp_path: Path) -> None:
    convert(make_model("llama"), tmp_path / "m", Options(to=CheckpointFormat.TORCH))
    message = refused(tmp_path / "m" / "release" / "mp_rank_00", tmp_path / "out")
    assert f"perhaps you mean {tmp_path / 'm' / 'release'}" in message


@pytest.mark.parametrize("tracked", ["", "12", "abc", "iter_5"])
def test_tracker_that_names_nothing(make_model: Callable[..., Path], tmp_path: Path, tracked: str) -> None:
    convert(make_model("llama"), tmp_path / "m", Options(to=CheckpointFormat.TORCH_DIST))
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text(tracked)
    assert "release" in refused(tmp_path / "m", tmp_path / "out")


def test_unsupported_scaling_for_megatron_lm(make_model: Callable[..., Path], tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 8.0}
    source = make_model("llama", rope_scaling={**rope, "original_max_position_embeddings": 256})
    message = refused(source, tmp_path / "out", Options(to=CheckpointFormat.TORCH_DIST))
    assert "high_freq_factor 8.0" in message and "nemo" in message
    convert(source, tmp_path / "out")


def test_latent_attention_that_megatron_lm_can_not_express_is_named(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    options = Options(to=CheckpointFormat.TORCH_DIST)
    message = refused(make_model("deepseek-v3"), tmp_path / "out", options)
    for words in (
        "an epsilon of 1e-06, and others with 1e-05",
        "score is that of 2",
        "original_max_position_embeddings 64",
    ):
        assert words in message
    notes = convert(make_model("deepseek-v2-lm"), tmp_path / "lm", options).notes
    for flags in ("--multi-latent-attention --qk-layernorm --q-lora-rank 48", "--mscale 1.5 --mscale-all-dim 0.7"):
        assert any(flags in note for note in notes), notes


@pytest.mark.parametrize(
    ("name", "field", "value", "argument"),
    [
        ("deepseek-v2-lm", "routed_scaling_factor", 1.0, "moe_router_topk_scaling_factor"),
        ("deepseek-v2-lm", "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}, "rope_type"),
        ("deepseek-v3-lm", "n_group", 2, "moe_router_num_groups"),
    ],
)
def test_arguments_of_megatron_lm_for_latent_attention_are_compared(
    make_model: Callable[..., Path], tmp_path: Path, name: str, field: str, value: Any, argument: str
) -> None:
    source = make_model(name)
    convert(source, tmp_path / "lm", Options(to=CheckpointFormat.TORCH_DIST))
    changed = shutil.copytree(source, tmp_path / "changed")
    config = json.loads((source / "config.json").read_text())
    assert field in config
    (changed / "config.json").write_text(json.dumps({**config, field: value}))
    assert f"{argument} is" in refused(tmp_path / "lm", tmp_path / "out", Options(hf_folder=changed))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("mistral-window", "sliding_window", None),
        ("qwen3-windows", "sliding_window", 60),
        ("qwen3-yarn", "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
        ("olmo3", "sliding_window", 41),
        ("smollm3", "no_rope_layers", [1, 1, 1, 1]),
        ("granite", "logits_scaling", 8.0),
        ("deepseek-v2", "routed_scaling_factor", 1.0),
        ("deepseek-v3", "topk_group", 1),
        ("glm4", "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}),
        ("gemma3", "query_pre_attn_scalar", 16),
        ("exaone4", "layer_types", ["full_attention"] * 4),
        ("ministral3", "rope_theta", 10000.0),
        ("seed-oss", "rms_norm_eps", 1e-5),
    ],
)
def test_a_checkpoint_is_not_read_with_other_settings_than_it_was_made_with(
    make_model: Callable[..., Path], tmp_path: Path, name: str, field: str, value: Any
) -> None:
    """None of them changes the name or the shape of a tensor."""
    source = make_model(name)
    convert(source, tmp_path / "nemo")
    changed = shutil.copytree(source, tmp_path / "changed")
    config = json.loads((source / "config.json").read_text())
    if name == "ministral3":
        field, value = "rope_parameters", {**config["rope_parameters"], field: value}
    (changed / "config.json").write_text(json.dumps({**config, field: value}))
    message = refused(tmp_path / "nemo", tmp_path / "out", Options(hf_folder=changed))
    assert "in the checkpoint and" in message and "by config.json" in message


def test_full_disk_is_refused_at_the_start(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    assert "free" in refused(make_model("llama"), tmp_path / "out")


@pytest.mark.parametrize("kind", CheckpointFormat, ids=str)
def test_write_that_fails_leaves_nothing(
    make_model: Callable[..., Path], tmp_path: Path, kind: CheckpointFormat
) -> None:
    """Files may not grow beyond 100 kB here: what a full disk or quota does in the middle of the work."""
    source = make_model("llama")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large|writing failed"):
            convert(source, tmp_path / "out", Options(to=kind, workers=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", list(CheckpointFormat)[1:], ids=str)
def test_every_missing_or_cut_file_of_a_checkpoint_is_noticed(
    make_model: Callable[..., Path], tmp_path: Path, kind: CheckpointFormat
) -> None:
    convert(make_model("llama"), tmp_path / "m", Options(to=kind, parallelism=Parallelism(2, 2), workers=2))
    files = [path for path in sorted((tmp_path / "m").rglob("*")) if path.suffix in (".distcp", ".pt")]
    files += list((tmp_path / "m").rglob(".metadata"))
    assert len(files) >= 4
    for path in files:
        content = path.read_bytes()
        for damaged in (b"", content[: len(content) // 2], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                convert(tmp_path / "m", tmp_path / "out")
            assert not (tmp_path / "out").exists()
            path.write_bytes(content)
    convert(tmp_path / "m", tmp_path / "out")
