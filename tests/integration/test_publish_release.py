"""publish_release.py against a server that speaks the hub's protocol: what it sends, and what it refuses to."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import READ_TOKEN, TOKEN, HubServer

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
REPO = "lab/tiny"
Publish = Callable[..., tuple[int, str]]


def command(name: str) -> Callable[[list[str]], int]:
    return runpy.run_path(str(REPOSITORY / f"{name}.py"))["main"]


@pytest.fixture(scope="module")
def home(
    make_hf_llama: Callable[..., Path],
    train_request: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with an experiment, and its released model `released` with the gate's report."""
    home = tmp_path_factory.mktemp("publish")
    model = shutil.copytree(make_hf_llama(), home / "base")
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# The base model's own card\n")
    text = home / "chapters.jsonl"
    text.write_text("".join(json.dumps({"text": f"chapter {number} " * 60}) + "\n" for number in range(40)))
    prepare = ["--input", str(text), "--output-prefix", str(home / "data" / "chapters"), "--append-eod"]
    assert command("tools/preprocess_data")([*prepare, "--tokenizer-model", str(model)]) == 0
    assert command("tools/convert_checkpoint")([str(model), str(home / "nemo")]) == 0
    words = ["--experiment", "run", "--experiments_dir", str(home), "--hf_model_id", str(model)]
    words += ["--nemo_model", str(home / "nemo"), "--dataset_path", str(home / "data"), "--sequence_length", "32"]
    words += ["--global_batch_size", "2", "--max_steps", "2", "--split", "80,20,0", "--val_interval", "1"]
    train_request([*words, "--val_steps", "1", "--accelerator", "cpu", "--num_gpus", "1"])
    checkpoint, released = str(home / "run" / "checkpoints" / "step_00000002"), str(home / "released")
    assert command("tools/convert_checkpoint")([checkpoint, released, "--max-shard-size", "100KB"]) == 0
    gate = ["--long-tokens", "48", "--num-sequences", "1"]
    assert command("tools/verify_release")([checkpoint, released, *gate]) == 0
    return home


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """The server, with a valid token in the environment."""
    from huggingface_hub import constants

    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    yield server
    server.close()


@pytest.fixture
def released(home: Path, tmp_path: Path) -> Path:
    """A copy of the released folder with its report."""
    shutil.copy(home / "released.verified.json", tmp_path)
    return shutil.copytree(home / "released", tmp_path / "released")


@pytest.fixture
def publish(capsys: pytest.CaptureFixture[str]) -> Publish:
    """Run the command in this process; gives its exit code, and what it printed."""

    def run(folder: Path, *words: str, repository: str = REPO) -> tuple[int, str]:
        main = command("tools/publish_release")
        code = main([str(folder), repository, "--base-model", "owner/base", *words])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_a_release_becomes_one_commit_with_a_card_from_the_records(
    hub: HubServer, released: Path, publish: Publish
) -> None:
    code, shown = publish(released, "--dry_run")
    assert code == 0 and not hub.requests, shown
    code, printed = publish(released)
    assert code == 0, printed
    repository = hub.repositories[REPO]
    assert repository.private and len(repository.branches["main"]) == 2, "the hub's first commit, and ours"
    oid, files = repository.branches["main"][-1]
    assert oid in printed
    names = {str(path.relative_to(released)) for path in released.rglob("*") if path.is_file()}
    assert files.keys() == names | {".gitattributes"} and all(name in shown for name in names)
    assert all(files[name] == (released / name).read_bytes() for name in names - {"README.md"})
    assert len(hub.uploads) > 2, "several weight files"
    card = files["README.md"].decode()
    assert card in shown
    assert "base model's own card" not in card
    for words in (
        "license: apache-2.0",
        "base_model: owner/base",
        "| steps | 2 of 2 |",
        "chapters.jsonl, 40 records",
        "128 tokens were trained on",
        "held-out loss |",
        "| hardware | 1 x CPU ranks |",
        "The release check passed",
        "lr 0.0003 -> 3e-05 cosine",
    ):
        assert words in card, f"{words}\n{card}"
    assert re.search(r"held-out loss \| [\d.]+ \(step 0\) \| [\d.]+ \(step 2\)", card)
    assert str(released.parent) not in card and "/tmp" not in card
    code, printed = publish(released)
    assert code == 0 and "has this release already" in printed
    assert len(repository.branches["main"]) == 2


def test_a_card_of_the_user_is_kept_and_its_marked_sections_are_filled(
    hub: HubServer, released: Path, publish: Publish
) -> None:
    head = "---\nlicense: apache-2.0\ntags: [mine]\n---\n# My model\nMy words.\n\n"
    marked = "<!-- pretrainkit:losses -->\nold\n<!-- /pretrainkit:losses -->"
    (released / "README.md").write_text(f"{head}{marked}\nThe end.\n")
    assert publish(released)[0] == 0
    card = hub.repositories[REPO].branches["main"][-1][1]["README.md"].decode()
    assert card.startswith(head) and card.endswith("\nThe end.\n") and "old" not in card
    assert "held-out loss |" in card and "Hardware" not in card
    # What is edited on the hub stays, too: the base model's card in the folder isn't the user's.
    shutil.copy(released.parent / "released.verified.json", released.parent / "again.verified.json")
    again = shutil.copytree(released, released.with_name("again"), ignore=shutil.ignore_patterns("README.md"))
    hub.add("lab/other", {"README.md": card.replace("My words", "Edited").encode()})
    assert publish(again, repository="lab/other")[0] == 0
    assert "Edited" in hub.repositories["lab/other"].branches["main"][-1][1]["README.md"].decode()


HOME = "/".join(["", "home", "alice"])
REFUSED_CARDS = {
    "a mark without an end": ("<!-- pretrainkit:data -->", "without its end"),
    "an unknown mark": ("<!-- pretrainkit:dta --><!-- /pretrainkit:dta -->", "<!-- pretrainkit:dta -->"),
    "another licence": (
        "---\nlicense: mit\n---\n<!-- pretrainkit:data --><!-- /pretrainkit:data -->",
        "--license mit",
    ),
    "a home directory": (f"see {HOME}/models", f"local path {HOME}"),
    "a token": (f"key: hf_{'a1' * 17}", "Hugging Face Token"),
}


@pytest.mark.parametrize(("card", "words"), REFUSED_CARDS.values(), ids=REFUSED_CARDS)
def test_a_doubtful_card_is_refused(hub: HubServer, released: Path, publish: Publish, card: str, words: str) -> None:
    (released / "README.md").write_text(card)
    code, printed = publish(released)
    assert code == 2 and words in printed, printed
    assert not hub.requests


def test_an_interrupted_upload_is_continued(hub: HubServer, released: Path, tmp_path: Path) -> None:
    hub.blocked_upload = threading.Event()
    words = [sys.executable, str(REPOSITORY / "tools" / "publish_release.py"), str(released), REPO]
    process = subprocess.Popen([*words, "--base-model", "owner/base"], env=process_environment(tmp_path))
    assert hub.is_blocked.wait(30)
    process.send_signal(signal.SIGTERM)
    hub.blocked_upload.set()
    assert process.wait(30) == 85
    before = list(hub.uploads)
    assert before and len(hub.repositories[REPO].branches["main"]) == 1, "no commit"
    hub.blocked_upload = None
    hub.dropped_uploads = 1  # the client tries this one again by itself
    done = subprocess.run(
        [*words, "--base-model", "owner/base"], env=process_environment(tmp_path), capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    assert sorted(hub.uploads) == sorted(set(hub.uploads)), "nothing was sent twice"
    assert set(before) < set(hub.uploads)


def process_environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HF_HOME": str(tmp_path / "hf")}


def test_a_lost_answer_to_the_commit_is_found_out(hub: HubServer, released: Path, publish: Publish) -> None:
    hub.drops_commit_answer = True
    code, printed = publish(released)
    assert code == 0 and "published" in printed, printed


def test_other_content_is_replaced_only_on_request_and_stays_in_the_history(
    hub: HubServer, released: Path, publish: Publish
) -> None:
    repository = hub.add(REPO, {"config.json": b"{}", "old.safetensors": b"old"})
    code, printed = publish(released)
    assert code == 2 and "config.json, old.safetensors" in printed and not hub.uploads
    assert publish(released, "--revision", "step-2")[0] == 0, "another branch"
    assert "old.safetensors" not in repository.branches["step-2"][-1][1]
    assert publish(released, "--overwrite")[0] == 0
    assert len(repository.branches["main"]) == 3 and "old.safetensors" not in repository.branches["main"][-1][1]
    hub.add("lab/open", private=False)
    code, printed = publish(released, repository="lab/open")
    assert code == 2 and "exists and is public" in printed
    assert publish(released, "--public", repository="lab/open")[0] == 0


@pytest.mark.parametrize(
    ("token", "words"),
    [("", "no access token"), ("hf_" + "x" * 34, "not valid"), (READ_TOKEN, "may only read")],
    ids=["missing", "invalid", "read-only"],
)
def test_a_token_that_can_not_write_is_refused(
    hub: HubServer, released: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch, token: str, words: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    code, printed = publish(released)
    assert code == 2 and words in printed, printed
    assert not hub.repositories
    assert token not in printed or not token


def test_an_owner_whose_repositories_this_account_may_not_make_is_refused(
    hub: HubServer, released: Path, publish: Publish
) -> None:
    code, printed = publish(released, repository="others/tiny")
    assert code == 2 and "may not write" in printed, printed


def change_weights(released: Path) -> None:
    path = min(released.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DOUBTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "changed weights": (change_weights, "changed after the gate: model-00001"),
    "a new file": (lambda folder: (folder / "notes.txt").write_text("x"), "changed after the gate: notes.txt"),
    "a missing file": (lambda folder: (folder / "generation_config.json").unlink(), "generation_config.json"),
    "no report": (lambda folder: (folder.parent / "released.verified.json").unlink(), "no report of the release gate"),
    "a failed check": (
        lambda folder: change_report(folder, checks=[{"name": "finite", "passed": False, "found": "x"}]),
        "the gate refused this release: finite",
    ),
    "files only": (lambda folder: change_report(folder, skipped=["the models were not run"]), "not all was checked"),
    "an experiment that is gone": (
        lambda folder: change_report(folder, sources=[str(folder / "gone")]),
        "is not there any more",
    ),
}


def change_report(released: Path, **fields: Any) -> None:
    path = released.parent / "released.verified.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(("change", "words"), DOUBTS.values(), ids=DOUBTS)
def test_a_doubt_about_the_release_is_refused(
    hub: HubServer, released: Path, publish: Publish, change: Callable[[Path], Any], words: str
) -> None:
    change(released)
    code, printed = publish(released)
    assert code == 2 and words in printed, printed
    assert not hub.requests


def test_the_gate_runs_on_request(hub: HubServer, home: Path, released: Path, publish: Publish) -> None:
    change_weights(released)
    checkpoint = str(home / "run" / "checkpoints" / "step_00000002")
    code, printed = publish(released, "--source", checkpoint)
    assert code == 1 and "bit-equal" in printed and not hub.requests
