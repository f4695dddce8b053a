"""Models for nodes without internet: complete, as the hub describes them, or not there.

The hub is a small server on this machine that speaks its protocol to the real huggingface_hub, and breaks off, changes
bytes or refuses when told to.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.data import hub as downloads
from pretrainkit.data.hub import Repository
from pretrainkit.errors import DataError, RequestError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": os.urandom(3 * 2**20),
    "pytorch_model.bin": b"the same again",
    "original/consolidated.00.pth": b"and again",
    "README.md": b"# a model",
}
LARGE = ("model.safetensors", "pytorch_model.bin", "original/consolidated.00.pth")
WANTED = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}


class Hub(ThreadingHTTPServer):
    """Serves one repository, someone/model."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.break_off: set[str] = set()
        """Files of which the first answer ends in the middle."""
        self.changed: set[str] = set()
        """Files that arrive with other bytes."""
        self.is_gated = False
        self.served: list[tuple[str, int]] = []
        """Name and first byte of each answer."""
        self.tokens: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    """The requests that the library makes."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        """Be quiet."""

    def do_HEAD(self) -> None:
        """Size and hash of a file."""
        self.do_GET()

    def do_GET(self) -> None:
        """The repository's description, or a file or the rest of it."""
        if self.path == "/api/agent-harnesses":  # once a day, for the library's own statistics
            return self._answer(404, b"", {})
        self.server.tokens.add(self.headers.get("Authorization", ""))
        if self.server.is_gated:
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask"})
        if self.path.startswith("/api/models/someone/model/tree/"):
            body = json.dumps([self._in_tree(name) for name in FILES])
            return self._answer(200, body.encode(), {"Content-Type": "application/json"})
        if self.path.startswith("/api/models/someone/model"):
            siblings = [self._described(name) for name in FILES]
            body = json.dumps({"id": "someone/model", "modelId": "someone/model", "sha": COMMIT, "siblings": siblings})
            return self._answer(200, body.encode(), {"Content-Type": "application/json"})
        name = self.path.removeprefix(f"/someone/model/resolve/{COMMIT}/")
        if name not in FILES:
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        return self._file(name)

    def _described(self, name: str) -> dict[str, object]:
        content = FILES[name]
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        described: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git}
        if name in LARGE:
            sha256 = hashlib.sha256(content).hexdigest()
            described["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
        return described

    def _in_tree(self, name: str) -> dict[str, object]:
        described = self._described(name)
        entry = {"type": "file", "path": name, "size": described["size"], "oid": described["blobId"]}
        if isinstance(lfs := described.get("lfs"), dict):
            entry["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
        return entry

    def _file(self, name: str) -> None:
        content = FILES[name]
        tag = hashlib.sha256(content).hexdigest()
        if name in self.server.changed:
            content = b"X" + content[1:]
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            self.server.served.append((name, begin))
        body = content[begin:]
        if self.command == "GET" and name in self.server.break_off:
            self.server.break_off.remove(name)
            self._answer(200, body[: len(body) // 2], headers | {"Content-Length": str(len(body))})
            self.close_connection = True
            return
        self._answer(206 if begin else 200, body, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, which huggingface_hub takes for the real one."""
    from huggingface_hub import close_session, constants

    server = Hub()
    close_session()  # a client that was made for being offline would refuse every address
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


MODEL = Repository("model", "someone/model", None)


def names_in(folder: Path) -> set[str]:
    """Files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_comes_whole_once_and_is_verified_again(hub: Hub, tmp_path: Path) -> None:
    folder = downloads.fetch(MODEL, tmp_path)
    assert folder == tmp_path / "models" / "someone" / "model"
    assert names_in(folder) == WANTED | {"prefetched.json"}, "weights in another form aren't wanted"
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    assert json.loads((folder / "prefetched.json").read_text())["commit"] == COMMIT
    assert names_in(tmp_path) == {f"models/someone/model/{name}" for name in WANTED | {"prefetched.json"}}
    hub.served.clear()
    assert downloads.fetch(MODEL, tmp_path) == folder and hub.served == []
    (folder / "config.json").write_bytes(FILES["config.json"].replace(b"Llama", b"llama"))
    with pytest.raises(DataError, match=r"not as fetched: config\.json"):
        downloads.fetch(MODEL, tmp_path)


def test_a_tokenizer_comes_without_weights(hub: Hub, tmp_path: Path) -> None:
    folder = downloads.fetch(Repository("tokenizer", "someone/model", None), tmp_path)
    assert names_in(folder) == {"config.json", "tokenizer.json", "prefetched.json"}
    assert folder == tmp_path / "tokenizers" / "someone" / "model"


def test_what_was_broken_off_goes_on_where_it_was(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def then_end(*words: Any, **settings: Any) -> None:
        download(*words, **settings)
        raise KeyboardInterrupt

    download = downloads._download
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(downloads, "_download", then_end)
        downloads.fetch(MODEL, tmp_path)
    assert not (tmp_path / "models" / "someone" / "model").exists()
    hub.served.clear()
    folder = downloads.fetch(MODEL, tmp_path)
    assert names_in(folder) == WANTED | {"prefetched.json"} and hub.served == [], "nothing comes twice"


def test_a_file_whose_connection_breaks_comes_at_the_second_attempt(hub: Hub, tmp_path: Path) -> None:
    hub.break_off = {"model.safetensors"}
    folder = downloads.fetch(MODEL, tmp_path)
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    starts = [begin for name, begin in hub.served if name == "model.safetensors"]
    assert starts == [0, 0]


def test_other_bytes_than_the_hub_describes_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.changed = {"model.safetensors", "config.json"}
    with pytest.raises(DataError, match=r"config\.json, model\.safetensors .* twice"):
        downloads.fetch(MODEL, tmp_path)
    assert not (tmp_path / "models" / "someone" / "model").exists()
    hub.changed = set()
    assert downloads.fetch(MODEL, tmp_path).is_dir()


def test_a_model_that_is_not_for_us_or_not_there_is_told(hub: Hub, tmp_path: Path) -> None:
    hub.is_gated = True
    with pytest.raises(RequestError, match="is gated"):
        downloads.fetch(MODEL, tmp_path)
    hub.is_gated = False
    with pytest.raises(RequestError, match="no model someone/other on the hub"):
        downloads.fetch(Repository("model", "someone/other", None), tmp_path)
    with pytest.raises(RequestError, match="OWNER/NAME"):
        downloads.parse_repository("model", "../etc/passwd")
    assert names_in(tmp_path) == set()


def test_too_little_room_is_said_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = downloads.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(RequestError, match=r"3\.0 MiB for someone/model"):
        downloads.fetch(MODEL, tmp_path)
    assert hub.served == []


def test_the_script_fetches_and_prints_how_to_be_offline(hub: Hub, tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "scripts" / "prefetch.sh"
    token = tmp_path / "token"
    token.write_text("hf_of_mine\n")
    image = tmp_path / "image.sqsh"
    image.write_bytes(b"hsqs of an image")
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHON": sys.executable, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(script), "--dir", str(tmp_path / "a b"), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = run("--tokenizer", "someone/model", "--token-file", str(token))
    assert done.returncode == 2 and "can be read by others" in done.stderr
    token.chmod(0o600)
    done = run("--tokenizer", "someone/model", "--token-file", str(token), "--image", str(image))
    assert done.returncode == 0, done.stderr
    assert names_in(tmp_path / "a b" / "tokenizers" / "someone" / "model") >= {"tokenizer.json"}
    assert hub.tokens == {"Bearer hf_of_mine"} and "hf_of_mine" not in done.stderr + done.stdout
    show = subprocess.check_output(["bash", "-c", f"{done.stdout}\necho $HF_HUB_OFFLINE; echo $PREFETCHED"], text=True)
    assert show.split("\n")[:2] == ["1", f"{tmp_path}/a b"]
    assert (tmp_path / "a b" / "offline.sh").read_text() == done.stdout
    assert run("--token", "hf_of_mine").returncode == 2 and run().returncode == 2
    image.write_bytes(b"half")
    assert run("--image", str(image)).returncode == 1


def test_the_size_of_what_is_missing_is_printed_and_nothing_fetched(hub: Hub, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "tools/prefetch.py", "--dir", str(tmp_path), "--model", "someone/model", "--size"]
    found = subprocess.check_output(command, env=environment, text=True, cwd=Path(__file__).parents[3])
    assert int(found) == sum(len(FILES[name]) for name in WANTED)
    assert hub.served == [] and names_in(tmp_path) == set()
