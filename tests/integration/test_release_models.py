"""The release gate as a user runs it, and its comparison of models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks

from pretrainkit.checkpoint.convert import Options, convert
from pretrainkit.checkpoint.detect import Kind
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.training.release import RunOptions, check_models

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
SMALL = RunOptions(long_tokens=48, num_sequences=1)


@pytest.fixture(scope="module")
def release(
    make_model: Callable[..., Path], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """A Megatron checkpoint and the Hugging Face folder released from it."""
    ranks.fork_server()  # models are compared in forks of it

    def make(name: str, kind: Kind, cut: Parallelism) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("release")
        shutil.copytree(make_model(name, vocab_size=320, pad_token_id=2), folder / "hf")
        for path in tokenizer_folder.iterdir():
            shutil.copy(path, folder / "hf")
        convert(folder / "hf", folder / "megatron", Options(to=kind, parallelism=cut))
        convert(folder / "megatron", folder / "released")
        return folder / "megatron", folder / "released"

    return make


def verify(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "tools/verify_release.py", *map(str, arguments)]
    return subprocess.run(
        [*command, "--long-tokens", "48", "--num-sequences", "1"], cwd=REPOSITORY, capture_output=True, text=True
    )


def test_command_passes_a_clean_release_and_writes_its_report(release: Callable[..., tuple[Path, Path]]) -> None:
    source, released = release("llama-tied", Kind.TORCH, Parallelism(2, 2))
    done = verify(source, released, "--base", source.parent / "hf")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(released.with_name("released.verified.json").read_text())
    names = [check["name"] for check in report["checks"]]
    assert report["passed"] and "logits at TP=1 are those of transformers" in names
    assert "logits at TP=2 are those of transformers" in names
    assert set(report["hashes"]) == {path.name for path in released.iterdir()}
    text = released.with_name("released.verified.md").read_text()
    assert "Release check: passed" in text and "before training" in text


def test_command_refuses_a_changed_release(release: Callable[..., tuple[Path, Path]]) -> None:
    source, released = release("llama", Kind.NEMO, Parallelism())
    config = json.loads((released / "config.json").read_text())
    (released / "config.json").write_text(json.dumps({**config, "rope_theta": 99.0}))
    done = verify(source, released, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["passed"] and report["skipped"]
    assert any("rope_theta" in check["found"] for check in report["checks"] if not check["passed"])


def test_release_that_is_no_model_is_a_wrong_request(tmp_path: Path) -> None:
    assert verify(tmp_path, tmp_path / "none").returncode == 2


def test_models_that_differ_are_noticed_by_their_logits(release: Callable[..., tuple[Path, Path]]) -> None:
    source, released = release("llama", Kind.TORCH_DIST, Parallelism())
    config = json.loads((released / "config.json").read_text())
    (released / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    failed = [check.name for check in check_models(source, released, options=SMALL) if not check.passed]
    assert "logits at TP=1 are those of transformers" in failed


def test_models_with_experts_are_compared(release: Callable[..., tuple[Path, Path]]) -> None:
    checks = check_models(*release("qwen3-moe", Kind.NEMO, Parallelism()), options=SMALL)
    assert all(check.passed for check in checks), checks
    assert len(checks) == 8
