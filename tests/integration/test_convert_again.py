"""A conversion typed again: done where the target is what it would write, refused by name where it isn't."""

from __future__ import annotations

import hashlib
import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pretrainkit.checkpoint.convert import convert

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
FORMATS = ("hf", "nemo", "torch_dist", "torch")
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A tool's exit code and what it says, in this process: its imports take longer than its work here."""

    def run(tool: str, *words: object) -> tuple[int, str]:
        main = runpy.run_path(str(REPOSITORY / "tools" / f"{tool}.py"))["main"]
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def content(folder: Path) -> dict[str, str]:
    """Every file below a folder, temporary ones included, with its hash."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def changed_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def change_weights(folder: Path, name: str, row: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][row] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("format", FORMATS)
def test_a_finished_conversion_typed_again_is_there_already_unless_anything_differs(
    make_model: Callable[..., Path], run: Run, tmp_path: Path, format: str
) -> None:
    source = model = shutil.copytree(make_model("llama"), tmp_path / "model")
    if format == "hf":
        source = tmp_path / "checkpoint"
        convert(model, source)
    target = tmp_path / "target"
    request = ("convert_checkpoint", source, target, "--target-format", format)
    assert run(*request, "--workers", 1)[0] == 0
    before = content(tmp_path)
    code, said = run(*request, "--workers", 3)  # as on a machine with another number of cores
    assert code == 0 and "already there" in said, said

    def refused(*flags: object, because: str) -> None:
        code, said = run(*request, *flags)
        assert code == 2 and f"{target}: exists, and isn't what this request writes: " in said, said
        assert because in said and "--overwrite" in said, said

    refused("--dtype", "bfloat16", because="model.embed_tokens.weight is float32 and not bfloat16")
    assert content(tmp_path) == before
    other = {
        "hf": (("--max-shard-size", "300KB"), "model-00001-of-"),
        "torch": (("--target-tensor-parallel-size", 2), "mp_rank_01/model_optim_rng.pt is missing"),
        "torch_dist": (("--iteration", 7), "latest_checkpointed_iteration.txt has other bytes"),
        "nemo": (("--make-vocab-size-divisible-by", 64), "context/io.json has "),
    }[format]
    refused(*other[0], because=other[1])
    weights = largest(target)
    changed_byte(weights, weights.stat().st_size // 2)
    refused(because=f"{weights.relative_to(target)} has other bytes")
    changed_byte(weights, weights.stat().st_size // 2)
    (target / "more.bin").touch()
    refused(because="more.bin isn't part of it")
    (target / "more.bin").unlink()
    removed = "generation_config.json" if format == "hf" else "hf_source/generation_config.json"
    (target / removed).unlink()
    refused(because=f"{removed} is missing")
    shutil.copyfile(model / "generation_config.json", target / removed)
    assert content(tmp_path) == before
    change_weights(model, "model.norm.weight", 0)  # seen before a byte is written
    if format == "hf":
        convert(model, shutil.move(source, tmp_path / "old") and source)
    refused(because="model.norm.weight has other values")


def test_a_small_change_of_the_source_and_a_damaged_target_are_found(
    make_model: Callable[..., Path], run: Run, tmp_path: Path
) -> None:
    model = shutil.copytree(make_model("llama"), tmp_path / "model")
    request = ("convert_checkpoint", model, tmp_path / "nemo")
    assert run(*request)[0] == 0
    change_weights(model, "model.embed_tokens.weight", 3)
    code, said = run(*request)
    assert code == 2 and "conversion.json has source_fingerprint" in said and "has other bytes" in said, said
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]
    (tmp_path / "nemo" / "weights" / ".metadata").unlink()
    code, said = run(*request)
    assert code == 2 and "exists, and isn't what this request writes" in said, said
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    code, said = run("convert_checkpoint", model, tmp_path / "notes")
    assert code == 2 and "not a model folder that is known" in said, said


def test_a_finished_merge_typed_again_is_there_already(
    make_model: Callable[..., Path], run: Run, tmp_path: Path
) -> None:
    parents = [shutil.copytree(make_model("llama"), tmp_path / f"checkpoint-{step}") for step in (1, 2, 3)]
    for row, parent in enumerate(parents):
        change_weights(parent, "model.norm.weight", row)
    request = ("merge_checkpoints", *parents[:2], tmp_path / "merged")
    assert run(*request)[0] == 0
    before = content(tmp_path)
    code, said = run(*request, "--json")
    assert code == 0 and "already there" in json.loads(said[said.index("{") : said.rindex("}") + 1])["notes"], said
    code, said = run("merge_checkpoints", *parents, tmp_path / "merged")
    assert code == 2 and "pretrainkit_origin.json states another origin: " in said, said
    assert content(tmp_path) == before
