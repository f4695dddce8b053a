"""Before its first step a run from trained weights proves that they compute what the Hugging Face model computes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks

from pretrainkit.checkpoint.convert import convert
from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING
from pretrainkit.run.json_lines import read_records

pytestmark = pytest.mark.integration

Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def model(make_hf_llama: Callable[..., Path]) -> Path:
    # As many key/value heads as heads, so that query and key can be exchanged; weights that say something.
    return make_hf_llama(num_key_value_heads=8, initializer_range=0.1)


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "nemo"
    convert(model, folder)
    return folder


def parity(records: list[dict[str, Any]]) -> dict[str, Any]:
    (record,) = [record for record in records if record.get("event") == "start_parity"]
    return record


def steps(records: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in records if "loss" in record]


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP=2": {"tensor": 2},
    "PP=2": {"pipeline": 2},
    "CP=2": {"context": 2},
    "DP=2": {"data_parallel": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_converted_weights_pass_and_the_run_is_the_same_as_without(
    model: Path, start: Path, train_tiny: Train, layout: dict[str, Any]
) -> None:
    with_parity = train_tiny(model, "with", initial_checkpoint=start, hf_weights=model, max_steps=2, **layout)
    record = parity(with_parity)
    print(record)
    assert record["result"] == "passed" and record["num_tokens"] == 128
    assert record["megatron_loss"] == pytest.approx(record["hf_loss"], abs=1e-5)
    assert with_parity.index(record) == 1, "directly after the start"
    without = train_tiny(
        *(model, "without"), initial_checkpoint=start, hf_weights=model, max_steps=2, start_parity="off", **layout
    )
    assert parity(without) | {"time": ""} == {
        "event": "start_parity",
        "time": "",
        "result": "skipped",
        "reason": "--start_parity off",
    }
    assert steps(with_parity) == steps(without)


def test_waiting_for_it_is_no_part_of_a_step_and_ended_by_a_signal(
    model: Path, start: Path, write_tiny_run: Callable[..., Path]
) -> None:
    run_file = write_tiny_run(
        *(model, "slow"), initial_checkpoint=start, hf_weights=model, max_steps=2, val_interval=1, val_steps=1
    )
    log = run_file.with_name("rank0.log")
    (process,) = ranks.start_ranks(ranks.train_rank_with_delays, 1, [log], run_file=run_file)
    wait_until(lambda: log.exists() and "share_reference comes later" in log.read_text(), process)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == EXIT_STOPPED_AFTER_SAVING, log.read_text()[-3000:]
    assert "got SIGTERM before the first step" in log.read_text()
    assert not steps(read_records(run_file.with_name("metrics.jsonl")))

    ranks.run_ranks(ranks.train_rank_with_delays, 1, run_file.parent, run_file=run_file)
    records = read_records(run_file.with_name("metrics.jsonl"))
    assert [record["step"] for record in records if "val_loss" in record] == [0, 1, 2]
    assert max(record["step_time_s"] for record in records if "loss" in record) < ranks.DELAY_S


def wait_until(happens: Callable[[], bool], process: Any) -> None:
    end = time.monotonic() + 120
    while not happens():
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.05)


def exchange_query_and_key(tensors: dict[str, Any]) -> None:
    query, key = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
    tensors[query], tensors[key] = tensors[key], tensors[query]


def randomise_a_layer(tensors: dict[str, Any]) -> None:
    import torch

    for name, tensor in tensors.items():
        if name.startswith("model.layers.1.") and tensor.dim() > 1:
            tensors[name] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9)) * 0.1


def faulty(model: Path, folder: Path, change: Callable[[dict[str, Any]], None], **config: Any) -> Path:
    """A checkpoint converted from a changed copy of a model."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder / "changed")
    tensors = load_file(folder / "changed" / "model.safetensors")
    change(tensors)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        folder / "changed" / "model.safetensors",
        metadata={"format": "pt"},
    )
    convert(folder / "changed", folder / "faulty")
    return folder / "faulty"


FAULTS = {"query and key exchanged": exchange_query_and_key, "a layer random": randomise_a_layer}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_weights_are_refused_before_the_first_step(
    model: Path, train_tiny: Train, tmp_path: Path, fault: str
) -> None:
    with pytest.raises(AssertionError, match=r"the loaded model is not that of(.|\n)*before the first step"):
        train_tiny(
            *(model, "refused"),
            initial_checkpoint=faulty(model, tmp_path, FAULTS[fault]),
            hf_weights=model,
            tensor=2,
        )
    records = read_records(tmp_path / "refused" / "metrics.jsonl")
    print(parity(records))
    assert parity(records)["result"] == "refused" and not steps(records)
    assert not list((tmp_path / "refused").glob("checkpoints/*"))


def test_another_rope_theta_is_refused(model: Path, start: Path, train_tiny: Train, tmp_path: Path) -> None:
    """The model that is trained follows --hf_model_id, the comparison the folder that the weights came from."""
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    )
    with pytest.raises(AssertionError, match="the loaded model is not that of"):
        train_tiny(changed, "refused", initial_checkpoint=start, hf_weights=model)
    print(parity(read_records(tmp_path / "refused" / "metrics.jsonl")))


def test_a_hugging_face_model_that_cannot_run_stops_all_ranks(
    model: Path, start: Path, train_tiny: Train, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\](.|\n)*missing(.|\n)*--start_parity off"):
        train_tiny(model, "broken", initial_checkpoint=start, hf_weights=broken, tensor=2)


def test_a_weight_that_the_engine_did_not_load_is_refused(
    model: Path, start: Path, write_tiny_run: Callable[..., Path]
) -> None:
    import ranks

    run_file = write_tiny_run(model, "partial", initial_checkpoint=start, tensor=2)
    with pytest.raises(AssertionError, match=r"were not in the checkpoint: .*linear_fc2"):
        ranks.run_ranks(ranks.train_rank_without_a_weight, 2, run_file.parent, run_file=run_file)
