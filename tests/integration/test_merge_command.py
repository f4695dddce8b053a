"""merge_checkpoints.py as a user types it, and what the release gate says of an average."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import ranks
import torch
from safetensors.torch import load_file, save_file

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.merge import Rule, average_of
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.run.checkpoints import Checkpoint, commit
from pretrainkit.run.folder import checkpoint_name

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
STEPS = (100, 200, 400)
Weights = dict[str, torch.Tensor]


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in this process: its imports take longer than its work here."""
    main = runpy.run_path(str(REPOSITORY / "tools" / f"{tool}.py"))["main"]
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main([str(word) for word in arguments])
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


def merge(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run("merge_checkpoints", *arguments)


def weights(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def reference(parents: list[Weights], shares: list[float], dtype: torch.dtype | None = None) -> Weights:
    """The average by numpy: fp32 products, added in order; checked against float64."""
    result = {}
    for name, last in parents[-1].items():
        terms = [
            parent[name].float().numpy() * np.float32(share) for parent, share in zip(parents, shares, strict=True)
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        wide = sum(parent[name].double().numpy() * share for parent, share in zip(parents, shares, strict=True))
        scale = sum(parent[name].double().abs().numpy() * share for parent, share in zip(parents, shares, strict=True))
        assert (np.abs(total - wide) <= len(parents) * 2**-23 * scale).all()
        result[name] = torch.from_numpy(total).to(dtype or last.dtype)
    return result


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    assert not [
        name
        for name, tensor in expected.items()
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)
    ]


@pytest.fixture(scope="module")
def make_parents(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Path]]:
    """Hugging Face folders step_00000100, ... of one model with other weights, and its tokenizer."""
    made: dict[tuple[str, str], list[Path]] = {}

    def make(name: str, dtype: str) -> list[Path]:
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name, dtype] = folders = [folder / checkpoint_name(step) for step in STEPS]
            for seed, path in enumerate(folders):
                config: dict[str, Any] = {"vocab_size": 320, "num_hidden_layers": 2, "pad_token_id": 2}
                hf_models.save_random_model(name, path, seed=seed, dtype=dtype, max_shard_size="5GB", **config)
                for file in tokenizer_folder.iterdir():
                    shutil.copy(file, path)
        return made[name, dtype]

    return make


@pytest.fixture(scope="module")
def experiment(make_parents: Callable[[str, str], list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment's folder with a complete NeMo checkpoint of each step, and an unfinished one."""
    folder = tmp_path_factory.mktemp("experiment")
    for step, parent in zip(STEPS, make_parents("llama", "float32"), strict=True):
        path = folder / "checkpoints" / checkpoint_name(step)
        convert(parent, path)
        commit(Checkpoint(path, step, step * 4))
    shutil.copytree(path, folder / "checkpoints" / checkpoint_name(500), ignore=shutil.ignore_patterns("complete.json"))
    return folder


@pytest.mark.parametrize("target", CheckpointFormat, ids=str)
@pytest.mark.parametrize(("name", "dtype"), [("llama-tied", "bfloat16"), ("qwen2-moe", "float32")])
def test_the_average_is_the_reference_from_any_format_and_layout_to_any(
    make_parents: Callable[[str, str], list[Path]], tmp_path: Path, name: str, dtype: str, target: CheckpointFormat
) -> None:
    parents = make_parents(name, dtype)
    layout = Parallelism(2, 2, 4 if "moe" in name else 1)
    convert(parents[1], tmp_path / "dist", Options(CheckpointFormat.TORCH_DIST, iteration=7))
    convert(parents[2], tmp_path / "torch", Options(CheckpointFormat.TORCH, parallelism=layout))
    found = average_of([parents[0], tmp_path / "dist", tmp_path / "torch"], Rule((3.0, 1.0, 2.0)))
    convert(found, tmp_path / "out", Options(target, parallelism=layout, workers=2))
    released = tmp_path / "out"
    if target is not CheckpointFormat.HF:
        released = tmp_path / "back"
        convert(tmp_path / "out", released)
    expected = reference([weights(parent) for parent in parents], [3 / 6, 1 / 6, 2 / 6])
    assert_equal(weights(released), expected)
    (step,) = json.loads((released / "pretrainkit_origin.json").read_text())["steps"]
    assert [(parent["name"], parent["step"]) for parent in step["parents"]] == [
        ("step_00000100", 100),
        ("iter_0000007", 7),
        ("torch", None),
    ]


def test_the_last_checkpoints_of_an_experiment(
    experiment: Path, make_parents: Callable[[str, str], list[Path]], tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "tools/merge_checkpoints.py",
        experiment,
        "--last",
        "2",
        tmp_path / "out",
    ]
    command += ["--last", "2", "--target-format", "hf", "--dtype", "bfloat16", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "skipping an incomplete checkpoint" in done.stderr and "step_00000500" in done.stderr
    report = json.loads(done.stdout)
    assert "average in fp32 (uniform): 0.5 x step_00000200, 0.5 x step_00000400" in report["notes"]
    parents = [weights(folder) for folder in make_parents("llama", "float32")]
    assert_equal(weights(tmp_path / "out"), reference(parents[1:], [0.5, 0.5], torch.bfloat16))
    passed = run("verify_release", experiment, tmp_path / "out", "--files-only")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "0.5 x step_00000200, 0.5 x step_00000400 (computed again)" in passed.stdout


def test_the_last_iterations_of_a_megatron_lm_run(
    make_parents: Callable[[str, str], list[Path]], tmp_path: Path
) -> None:
    parents = make_parents("llama", "float32")
    for iteration, parent in enumerate(parents, 1):
        convert(parent, tmp_path / "one", Options(CheckpointFormat.TORCH_DIST, iteration=iteration, overwrite=True))
        shutil.copytree(tmp_path / "one", tmp_path / "run", dirs_exist_ok=True)
    done = merge(tmp_path / "run", "--last", 2, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "0.5 x iter_0000002, 0.5 x iter_0000003" in done.stdout
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    convert(tmp_path / "out", tmp_path / "back")
    assert_equal(weights(tmp_path / "back"), reference([weights(parent) for parent in parents[1:]], [0.5, 0.5]))


def test_a_parent_with_nan_is_named(make_parents: Callable[[str, str], list[Path]], tmp_path: Path) -> None:
    first, second, _ = make_parents("llama", "float32")
    shutil.copytree(first, tmp_path / "bad")
    tensors = weights(first)
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "bad" / "model.safetensors", {"format": "pt"})
    done = merge(tmp_path / "bad", second, tmp_path / "out", "--target-format", "nemo")
    assert done.returncode == 1 and "model.layers.1.self_attn.q_proj.weight (1 NaN)" in done.stderr
    assert not (tmp_path / "out").exists()


def test_moving_average_over_steps(
    experiment: Path, make_parents: Callable[[str, str], list[Path]], tmp_path: Path
) -> None:
    flags = ("--steps", *STEPS, "--ema-decay", 0.8, "--ema-interval", 100)
    done = merge(experiment, tmp_path / "out", *flags)
    assert done.returncode == 0, done.stderr
    average = {name: tensor.double() for name, tensor in weights(make_parents("llama", "float32")[0]).items()}
    for folder, kept in zip(make_parents("llama", "float32")[1:], (0.8, 0.8**2), strict=True):
        average = {name: kept * average[name] + (1 - kept) * tensor for name, tensor in weights(folder).items()}
    convert(tmp_path / "out", tmp_path / "back")
    for name, tensor in weights(tmp_path / "back").items():
        assert torch.allclose(tensor.double(), average[name], rtol=1e-5, atol=1e-7), name


def test_gate_compares_an_average_with_its_parents(
    experiment: Path, make_parents: Callable[[str, str], list[Path]], tmp_path: Path
) -> None:
    parents = [experiment / "checkpoints" / checkpoint_name(step) for step in STEPS]
    assert merge(*parents, tmp_path / "average", "--weights", 1, 2, 3).returncode == 0
    assert run("convert_checkpoint", tmp_path / "average", tmp_path / "released").returncode == 0
    ranks.fork_server()  # models are compared in forks of it
    small = ("--long-tokens", 48, "--num-sequences", 1)
    whole = run("verify_release", *reversed(parents), tmp_path / "released", *small)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "(computed again)" in whole.stdout and "logits at TP=2" in whole.stdout
    alone = run("verify_release", tmp_path / "average", tmp_path / "released", "--files-only")
    assert alone.returncode == 0 and "(stated by the source too)" in alone.stdout
    other = run("verify_release", *parents[:2], make_parents("llama", "float32")[0], tmp_path / "released")
    assert other.returncode == 2 and "step_00000400" in other.stderr
    single = run("verify_release", parents[0], tmp_path / "released", "--files-only")
    assert single.returncode == 1 and "the source is made of: nothing" in single.stdout
    tensors = weights(tmp_path / "released")
    tensors["model.norm.weight"][3] = torch.nextafter(tensors["model.norm.weight"][3], torch.tensor(9.0))
    save_file(tensors, tmp_path / "released" / "model.safetensors", {"format": "pt"})
    changed = run("verify_release", experiment, tmp_path / "released", "--files-only")
    assert changed.returncode == 1 and "model.norm.weight (1 of 64 elements)" in changed.stdout
    (tmp_path / "released" / "pretrainkit_origin.json").unlink()
    silent = run("verify_release", tmp_path / "average", tmp_path / "released", "--files-only")
    assert silent.returncode == 1 and "pretrainkit_origin.json states: nothing" in silent.stdout


def changed(parent: Path, folder: Path, name: str, **fields: Any) -> Path:
    """A copy of a parent with other fields in one of its JSON files."""
    shutil.copytree(parent, folder)
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | fields))
    return folder


def test_parents_that_differ_are_refused_by_name(
    make_parents: Callable[[str, str], list[Path]], tmp_path: Path
) -> None:
    first, second, _ = make_parents("llama", "float32")
    longer = changed(first, tmp_path / "a", "config.json", max_position_embeddings=1024)
    ending = changed(first, tmp_path / "b", "config.json", eos_token_id=5)
    tokenizer = changed(first, tmp_path / "c", "tokenizer.json", version="2.0")
    half = tmp_path / "d"
    convert(first, half, Options(CheckpointFormat.HF, dtype=torch.bfloat16))
    for parents, words in (
        ((longer, second), ("max_position_embeddings 1024 and not 512", str(longer))),
        ((ending, second), ("eos_token_id 5 and not 1", str(ending))),
        ((tokenizer, second), ("another tokenizer (tokenizer.json)", str(tokenizer))),
        ((half, second), ("is bfloat16 and not float32", "--dtype float32")),
        ((make_parents("llama-tied", "bfloat16")[0], second), ("tie_word_embeddings True and not False",)),
        ((first, first), ("given twice",)),
        ((first,), ("--last N",)),
        ((first, second, "--weights", 1), ("1 weights for 2 checkpoints",)),
        ((first, second, "--weights", 1, -1), ("-1", "above 0")),
        ((second, first, "--ema-decay", 0.9), ("ascending steps",)),
        ((first, second, "--ema-decay", 1), ("between 0 and 1",)),
        ((half, second, "--ema-decay", 0.9), ("the step of d is not known",)),
        ((first.parent, "--last", 4), ("3 complete checkpoints: steps 100, 200, 400",)),
        ((first.parent, "--steps", 100, 300), ("no checkpoint of step 300",)),
    ):
        at = next((i for i, word in enumerate(parents) if str(word).startswith("--")), len(parents))
        done = merge(*parents[:at], tmp_path / "out", *parents[at:])
        assert done.returncode == 2, (parents, done)
        assert all(word in done.stderr for word in words), (parents, done)
        assert not (tmp_path / "out").exists()


def test_killed_merge_leaves_no_folder_that_looks_complete(
    make_parents: Callable[[str, str], list[Path]], tmp_path: Path
) -> None:
    found = average_of(make_parents("llama", "float32"), Rule())
    options = Options(CheckpointFormat.HF, max_shard_bytes=20_000, overwrite=True)
    convert(found, tmp_path / "whole", options)
    started = time.monotonic()
    convert(found, tmp_path / "whole", options)
    duration_s, killed = time.monotonic() - started, 0
    for attempt in range(8):
        process = multiprocessing.get_context("fork").Process(target=convert, args=(found, tmp_path / "out", options))
        process.start()
        time.sleep(duration_s * (attempt + 0.5) / 8)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        if (tmp_path / "out").exists():
            assert {path.name for path in (tmp_path / "out").iterdir()} == {
                path.name for path in (tmp_path / "whole").iterdir()
            }
    assert killed
    convert(found, tmp_path / "out", options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
