"""Faults planted in a model folder or in a release: the conversion or the gate names each, through their commands."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_models import LLAMA3_ROPE

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
ABSENT = "absent"
Run = Callable[..., tuple[int, str]]

# (model, changes of config.json, words of the message)
SOURCE_FAULTS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("qwen3-moe", {"num_experts": ABSENT, "num_local_experts": ABSENT}, ["experts.100"]),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling_x.Model"}}, ["auto_map", "modeling_x.Model"]),
    ("llama", {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, ["LlamaForCausalLM, MistralForCausalLM"]),
    ("llama", {"architectures": "LlamaForCausalLM"}, ["'LlamaForCausalLM'", "list of class names"]),
    ("llama", {"model_type": "mistral"}, ["LlamaForCausalLM", "'mistral'", "contradict"]),
    ("llama", {"rope_scaling": {"type": "linear", "rope_type": "default"}}, ["'default' and type 'linear'"]),
    ("llama", {"torch_dtype": "bfloat16"}, ["dtype 'float32' and torch_dtype 'bfloat16'"]),
    ("llama", {"dtype": "float33"}, ["dtype 'float33'", "bfloat16, float16, float32"]),
    ("llama", {"dtype": 32}, ["dtype 32", "float32"]),
    *(
        ("llama", {name: value}, [f"{name} {value!r}", "vocab_size" if name.endswith("_id") else "a whole number"])
        for name, value in {"vocab_size": 320.0, "hidden_size": True, "num_hidden_layers": "4", "head_dim": 8.5,
                            "num_attention_heads": 0, "num_key_value_heads": -4, "max_position_embeddings": 512.5,
                            "eos_token_id": 320, "bos_token_id": -1}.items()
    ),
    ("llama", {"eos_token_id": [1, 320]}, ["eos_token_id [1, 320]", "0 to 319"]),
    ("llama", {"eos_token_id": "1"}, ["eos_token_id '1'", "whole number"]),
    ("llama", {"pad_token_id": True}, ["pad_token_id True", "whole number"]),
    ("llama", {"rms_norm_eps": "1e-6"}, ["rms_norm_eps '1e-6'", "a number"]),
    ("llama", {"initializer_range": float("nan")}, ["initializer_range nan", "a number"]),
    ("llama", {"tie_word_embeddings": "false"}, ["tie_word_embeddings 'false'", "true or false"]),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": "10000"}}, ["rope_theta '10000'", "a number"]),
    ("llama3-rope", {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192.0}},
     ["original_max_position_embeddings 8192.0", "a whole number"]),
    ("qwen3-moe", {"num_local_experts": "8"}, ["num_local_experts '8'", "a whole number"]),
    ("qwen3-moe", {"norm_topk_prob": 1}, ["norm_topk_prob 1", "true or false"]),
    ("mixtral", {"router_aux_loss_coef": True}, ["router_aux_loss_coef True", "a number"]),
]  # fmt: skip
RELEASE_FAULTS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("mistral", {"sliding_window": ABSENT, "max_position_embeddings": 8192}, ["sliding_window: 4096 and not None"]),
    ("qwen3-moe", {"norm_topk_prob": ABSENT}, ["norm_topk_prob: False and not True"]),
    ("qwen3-moe", {"num_experts_per_tok": ABSENT}, ["num_experts_per_tok: 8 and not 2"]),
    ("llama", {"max_position_embeddings": ABSENT}, ["max_position_embeddings: 2048 and not 512"]),
    ("llama-tied", {"tie_word_embeddings": ABSENT}, ["tie_word_embeddings: False and not True"]),
    ("llama", {"model_type": ABSENT}, ["model_type: None and not 'llama'"]),
    ("llama", {"architectures": ABSENT}, ["architectures: None"]),
    ("llama", {"dtype": ABSENT}, ["config.json states none"]),
    ("llama", {"dtype": None}, ["config.json states none"]),
    ("llama", {"dtype": "bfloat16"}, ["model.embed_tokens.weight is torch.float32", "31 more"]),
    *(
        (model, changes, words[:1])
        for model, changes, words in SOURCE_FAULTS
        if model == "llama" and ABSENT not in changes.values()
    ),
]  # fmt: skip


def case_id(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value).replace(" ", "")[:60]
    return value if isinstance(value, str) else ""


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    changed = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in changed.items() if value != ABSENT}))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command of tools/ in this process; gives its exit code, and what it printed."""

    def call(name: str, *arguments: object) -> tuple[int, str]:
        main = runpy.run_path(str(REPOSITORY / "tools" / f"{name}.py"))["main"]
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


@pytest.fixture(scope="module")
def model(
    make_model: Callable[..., Path], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A folder with `hf`, a complete model; the same name gives the same folder."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            shutil.copytree(make_model(name, vocab_size=320, pad_token_id=2), made[name] / "hf")
            shutil.copytree(tokenizer_folder, made[name] / "hf", dirs_exist_ok=True)
        return made[name]

    return make


@pytest.mark.parametrize(("name", "changes", "words"), SOURCE_FAULTS, ids=case_id)
def test_fault_of_a_model_folder_is_refused_before_anything_is_written(
    model: Callable[[str], Path], run: Run, tmp_path: Path, name: str, changes: dict[str, Any], words: list[str]
) -> None:
    source = shutil.copytree(model(name) / "hf", tmp_path / "hf")
    change_config(source, changes)
    code, printed = run("convert_checkpoint", source, tmp_path / "out")
    assert code == 2 and all(word in printed for word in words), printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "changes", "words"), RELEASE_FAULTS, ids=case_id)
def test_fault_of_a_release_is_named_by_the_gate(
    model: Callable[[str], Path], run: Run, tmp_path: Path, name: str, changes: dict[str, Any], words: list[str]
) -> None:
    folder = model(name)
    if not (folder / "released").exists():
        assert run("convert_checkpoint", folder / "hf", folder / "megatron", "--target-format", "torch_dist")[0] == 0
        assert run("convert_checkpoint", folder / "megatron", folder / "released")[0] == 0
        code, printed = run("verify_release", folder / "megatron", folder / "released", "--files-only")
        assert code == 0, printed
    released = shutil.copytree(folder / "released", tmp_path / "released")
    change_config(released, changes)
    code, printed = run("verify_release", folder / "megatron", released, "--files-only")
    failed = "\n".join(line for line in printed.splitlines() if "FAILED" in line)
    assert code == 1 and all(word in failed for word in words), printed


def test_a_model_without_its_type_is_released_with_it(model: Callable[[str], Path], run: Run, tmp_path: Path) -> None:
    source = shutil.copytree(model("qwen3") / "hf", tmp_path / "hf")
    change_config(source, {"model_type": ABSENT})
    assert run("convert_checkpoint", source, tmp_path / "m")[0] == 0
    assert run("convert_checkpoint", tmp_path / "m", tmp_path / "released")[0] == 0
    assert json.loads((tmp_path / "released" / "config.json").read_text())["model_type"] == "qwen3"
    code, printed = run("verify_release", tmp_path / "m", tmp_path / "released", "--files-only")
    assert code == 0, printed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "bfloat16"}, ["dtype bfloat16; 39 tensors are float32", "model.embed_tokens.weight"]),
        ({"dtype": ABSENT}, ["no dtype; 39 tensors are float32"]),
    ],
    ids=["another", "absent"],
)
def test_a_conversion_says_which_weights_have_another_dtype_than_stated(
    model: Callable[[str], Path], run: Run, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    source = shutil.copytree(model("llama") / "hf", tmp_path / "hf")
    change_config(source, changes)
    code, printed = run("convert_checkpoint", source, tmp_path / "m")
    assert code == 0 and all(word in printed for word in words), printed


def test_one_tensor_of_another_dtype_is_named_by_both(model: Callable[[str], Path], run: Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(model("llama") / "hf", tmp_path / "hf")
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    code, printed = run("convert_checkpoint", source, tmp_path / "m")
    assert code == 0 and "dtype float32; 1 tensors are bfloat16: model.norm.weight" in printed, printed
    assert run("convert_checkpoint", tmp_path / "m", tmp_path / "released")[0] == 0
    code, printed = run("verify_release", tmp_path / "m", tmp_path / "released", "--files-only")
    assert code == 1 and "model.norm.weight is torch.bfloat16" in printed, printed
