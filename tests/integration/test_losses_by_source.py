"""Held-out losses by part, label and set, and blends whose weights change, through the commands."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.data.indexed.format import IndexedDataset

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
TEXTS = REPOSITORY / "tests" / "data" / "three_languages.jsonl"
"""Articles of the Universal Declaration of Human Rights."""
LENGTH = 96
Train = Callable[..., list[dict[str, Any]]]
pretrain = runpy.run_path(str(REPOSITORY / "pretraining" / "pretrain.py"))["main"]
preprocess = runpy.run_path(str(REPOSITORY / "tools" / "preprocess_data.py"))["main"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """Pairs `en`, `ja` and `de`, a pair `all` of them with labels, and `one`: a single document."""
    folder = tmp_path_factory.mktemp("data")
    records = [json.loads(line) for line in TEXTS.read_text(encoding="utf-8").splitlines()]
    found = {language: [each for each in records if each["lang"] == language] for language in ("en", "ja", "de")}
    found["one"] = [{"lang": "en", "text": " ".join(each["text"] for each in found["en"][:6])}]
    for name, some in {**found, "all": records}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in some), encoding="utf-8")
        words = ["--input", folder / f"{name}.jsonl", "--output-prefix", folder / name, "--append-eod"]
        words += ["--tokenizer-model", tokenizer_folder, *(["--label-key", "lang"] if name == "all" else [])]
        assert preprocess([*map(str, words)]) == 0
    return folder


@pytest.fixture(scope="module")
def words(make_hf_llama: Callable[..., Path], data: Path) -> Callable[..., list[str]]:
    """The command line of a tiny run on the three languages; more flags follow."""
    model = make_hf_llama(seed=5)
    convert(model, data / "nemo", Options(to=CheckpointFormat.NEMO))
    blend = f"0.5 {data}/en_text_document 0.3 {data}/ja_text_document 0.2 {data}/de_text_document"

    def flags(home: Path, experiment: str, max_steps: int, *more: object) -> list[str]:
        given = ["--hf_model_id", model, "--dataset_path", blend, "--sequence_length", LENGTH, "--split", "8,2,0"]
        given += ["--accelerator", "cpu", "--num_gpus", 1, "--global_batch_size", 4, "--lr", 1e-3, "--num_workers", 0]
        given += [
            "--lr_schedule",
            "constant",
            "--lr_warmup_steps",
            0,
            "--nemo_model",
            data / "nemo",
            "--val_interval",
            4,
            "--val_steps",
            3,
            "--start_parity",
            "off",
        ]
        given += ["--experiments_dir", home, "--experiment", experiment, "--max_steps", max_steps]
        return [*map(str, given + list(more))]

    return flags


def evaluations(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in records if "val_loss" in record}


def losses(records: list[dict[str, Any]]) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of experiments."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def unbroken(words: Callable[..., list[str]], data: Path, home: Path, train_request: Train) -> list[dict[str, Any]]:
    """The records of 8 steps of the experiment `unbroken`, whose blend changes after 4."""
    sets = ["--valid_path", f"all={data}/all_text_document", f"one={data}/one_text_document"]
    return train_request(words(home, "unbroken", 8, *sets, "--blend_schedule", "4:0,1,1", "--save_interval", 4))


def test_losses_of_parts_labels_and_sets_add_up(unbroken: list[dict[str, Any]], data: Path) -> None:
    assert list(evaluations(unbroken)) == [0, 4, 8]
    manifests = {
        name: json.loads((data / f"{name}_text_document.manifest.json").read_text())
        for name in ("en", "ja", "de", "all", "one")
    }
    texts = [json.loads(line) for line in (data / "all.jsonl").read_text(encoding="utf-8").splitlines()]
    for language in ("en", "ja", "de"):
        num_bytes = sum(len(each["text"].encode()) for each in texts if each["lang"] == language)
        assert manifests[language]["num_text_bytes"] == manifests["all"]["labels"]["text_bytes"][language] == num_bytes
    for record in evaluations(unbroken).values():
        for group in ("part", "label"):
            by_group, tokens = record[f"val_loss_by_{group}"], record[f"val_tokens_by_{group}"]
            assert set(by_group) == {f"{language}_text_document" for language in ("en", "ja", "de")}
            assert sum(tokens.values()) == record["val_tokens"] == 3 * 4 * LENGTH
            whole = sum(by_group[name] * tokens[name] for name in tokens) / record["val_tokens"]
            assert whole == pytest.approx(record["val_loss"], abs=1e-9)
        by_position, tokens = record["val_loss_by_position"], record["val_tokens_by_position"]
        assert tokens == {"0": 3 * 4 * 64, "64": 3 * 4 * 32}
        assert (2 * by_position["0"] + by_position["64"]) / 3 == pytest.approx(record["val_loss"], abs=1e-9)
        of_set, tokens = record["val_loss_by_set"], record["val_tokens_by_set"]
        assert set(of_set) == {"all", "all/en", "all/ja", "all/de", "one"}
        assert tokens["one"] == (manifests["one"]["num_tokens"] - 1) // LENGTH * LENGTH, "one pass, padded to a batch"
        assert sum(tokens[f"all/{name}"] for name in ("en", "ja", "de")) == tokens["all"] == 3 * 4 * LENGTH
        for name, manifest in (("ja", manifests["ja"]), ("en", manifests["en"])):
            bits = record["val_loss_by_part"][f"{name}_text_document"] / math.log(2)
            bits *= manifest["num_tokens"] / manifest["num_text_bytes"]
            assert record["val_bits_per_byte_by_part"][f"{name}_text_document"] == pytest.approx(bits)
    first, last = evaluations(unbroken)[0], evaluations(unbroken)[8]
    assert last["val_loss_by_set"]["all/ja"] < first["val_loss_by_set"]["all/ja"] - 0.1


def test_the_loss_before_the_first_step_is_that_of_transformers(
    unbroken: list[dict[str, Any]], words: Callable[..., list[str]], data: Path
) -> None:
    """Of a set with one document: its samples are the document's tokens in their order."""
    import torch
    from transformers import AutoModelForCausalLM

    command = words(data, "none", 1)
    model = AutoModelForCausalLM.from_pretrained(command[command.index("--hf_model_id") + 1], dtype=torch.float32)
    ids = torch.from_numpy(np.array(IndexedDataset(data / "one_text_document").tokens, dtype=np.int64))
    count = (len(ids) - 1) // LENGTH
    with torch.no_grad():
        logits = model(ids[: count * LENGTH].view(count, LENGTH)).logits
    # Megatron's vocabulary is padded to 384 rows, whose logits are 0.
    padded = torch.cat([logits, torch.zeros(*logits.shape[:2], 384 - logits.shape[2])], dim=2)
    loss = torch.nn.functional.cross_entropy(padded.flatten(0, 1), ids[1 : count * LENGTH + 1])
    assert evaluations(unbroken)[0]["val_loss_by_set"]["one"] == pytest.approx(float(loss), abs=1e-5)


@pytest.mark.parametrize("layout", ["DP=2", "TP=2", "PP=2", "CP=2"])
def test_layouts_have_the_same_losses(
    unbroken: list[dict[str, Any]],
    words: Callable[..., list[str]],
    data: Path,
    train_request: Train,
    tmp_path: Path,
    layout: str,
) -> None:
    names = {"TP=2": "tensor_model", "PP=2": "pipeline_model", "CP=2": "context"}
    flags = {name: [f"--{what}_parallel_size", 2] for name, what in names.items()}
    sets = ["--valid_path", f"all={data}/all_text_document", "--valid_path", f"one={data}/one_text_document"]
    more = [*flags.get(layout, []), "--blend_schedule", "4:0,1,1", "--num_gpus", 2]
    found = evaluations(train_request(words(tmp_path, "e", 4, *sets, *more)))
    for step, record in found.items():
        expected = evaluations(unbroken)[step]
        assert record.keys() == expected.keys()
        for name, value in record.items():
            assert value == pytest.approx(expected[name], abs=2e-5), (step, name)


def test_a_run_whose_blend_is_changed_on_purpose_is_one_that_was_planned(
    unbroken: list[dict[str, Any]],
    words: Callable[..., list[str]],
    data: Path,
    train_request: Train,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_request(words(tmp_path, "changed", 4, "--save_interval", 4))
    changed = words(tmp_path, "changed", 6, "--save_interval", 2, "--blend_schedule", "4:0,1,1")
    capsys.readouterr()
    assert pretrain([*changed, "--plan"]) == 2
    assert "dataset.schedule was [], now" in (said := capsys.readouterr().err) and "--allow_data_change" in said
    past = words(tmp_path, "changed", 6, "--blend_schedule", "3:0,1,1", "--allow_data_change")
    assert pretrain([*past, "--plan"]) == 2
    assert "it changes the weights of steps that are done" in capsys.readouterr().err
    assert pretrain([*words(tmp_path, "changed", 6, "--blend_schedule", "4:0,1"), "--plan"]) == 2
    assert "2 weights at step 4, and --dataset_path has 3 parts" in capsys.readouterr().err
    records = train_request([*changed, "--allow_data_change"])
    sets = ["--valid_path", f"all={data}/all_text_document", f"one={data}/one_text_document"]
    again = words(tmp_path, "changed", 8, "--blend_schedule", "4:0,1,1", *sets)  # in pieces, without the flag
    records = train_request(again)
    assert {step: losses(records)[step] for step in range(1, 9)} == losses(unbroken)
    assert evaluations(records)[8] == evaluations(unbroken)[8]
    mixtures = [record for record in records if record.get("event") == "mixture"]
    drawn = [(each["from_step"], each["num_samples"], _shares(each, "drawn")) for each in mixtures]
    assert [each[:2] for each in drawn] == [(0, 16), (4, 8), (6, 8)]
    assert drawn[0][2] == pytest.approx((0.5, 0.3, 0.2), abs=0.05) and drawn[1][2] == (0.0, 0.5, 0.5)
    assert _shares(mixtures[1], "asked") == (0.0, 0.5, 0.5)


def test_a_branch_is_evaluated_before_its_first_step(
    unbroken: list[dict[str, Any]], words: Callable[..., list[str]], data: Path, home: Path, train_request: Train
) -> None:
    sets = ["--valid_path", f"all={data}/all_text_document", f"one={data}/one_text_document"]
    branch = words(home, "branch", 8, *sets, "--blend_schedule", "4:0,1,1", "--branch_from", "unbroken:4")
    records = train_request(branch)
    assert losses(records) == {step: loss for step, loss in losses(unbroken).items() if step > 4}
    assert evaluations(records) == {step: each for step, each in evaluations(unbroken).items() if step}


def _shares(mixture: dict[str, Any], what: str) -> tuple[float, ...]:
    return tuple(share[what] for share in mixture["shares"].values())


def test_wrong_validation_sets_and_schedules_are_refused(
    words: Callable[..., list[str]], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = ["--valid_path", f"none={data}/none"]
    short = ["--valid_path", f"a/b={data}/one_text_document", "--sequence_length", 4000]
    for more, expected in (
        (nothing, "--valid_path none"),
        (short, "'a/b'"),
        (short, "fewer than one sample"),
        (["--valid_path", "x"], "NAME=VALUE"),
        (["--blend_schedule", "4:0,0,0"], "'STEP:WEIGHT,WEIGHT,... STEP:...'"),
        (["--blend_schedule", "4:1,1,1 2:1,1,1"], "steps in ascending order"),
    ):
        assert pretrain([*words(tmp_path, "e", 4, *more), "--plan"]) == 2
        assert expected in capsys.readouterr().err, expected
    only_sets = ["--valid_path", f"all={data}/all_text_document", "--split", "100,0,0", "--dry_run"]
    assert pretrain([*words(tmp_path, "e", 4, *only_sets)]) == 0
    said = capsys.readouterr()
    assert "12 samples of all" in said.out, said.out
