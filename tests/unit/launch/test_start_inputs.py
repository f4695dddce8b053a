"""What is read of a request's inputs before anything else is checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pretrainkit.config.schema import RunConfig
from pretrainkit.launch.start import inspect_inputs
from pretrainkit.models.megatron_fields import nemo_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("family", "scaling", "config_class"),
    [
        ("Llama", LLAMA3_ROPE, "Llama31Config"),
        ("Qwen2", None, "Qwen2Config"),
        ("Qwen2", LLAMA3_ROPE, "LayerFeaturesConfig"),
    ],
    ids=["llama", "qwen2", "qwen2 with llama3 scaling"],
)
def test_a_model_that_nemo_has_no_class_for_has_ours(
    family: str, scaling: dict[str, object] | None, config_class: str, hf_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(hf_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    facts, problems = inspect_inputs(RunConfig(hf_model_id=str(folder), experiments_dir=str(tmp_path)))
    assert facts.model and not problems
    assert nemo_model(facts.model).config_class.endswith(f":{config_class}")
