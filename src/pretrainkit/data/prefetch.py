"""Brings models and tokenizers from the hub to a folder on a group disk, for nodes without internet.

A model lies in DIR/models/OWNER/NAME, a tokenizer with its config in DIR/tokenizers/OWNER/NAME: plain folders, for
--hf_model_id, --nemo_model and --tokenizer-model. Each appears when every file has the size and the hash that the hub
says; prefetched.json in it holds the commit and those hashes. What was stopped goes on where it was. Tokens come from
HF_TOKEN or `hf auth login`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.data.hub import CONFIG_AND_TOKENIZER, HUB_ID, hub_errors
from pretrainkit.errors import DataError, PretrainkitError, RequestError, one_line
from pretrainkit.logs import get_logger
from pretrainkit.units import format_bytes

RECORD = "prefetched.json"
OTHER_WEIGHTS = ("original/*", "*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot")
"""Weights in other forms, left out where there are safetensors."""
FOLDERS = {"model": "models", "tokenizer": "tokenizers"}
TRIES = 5
"""How often a download that breaks off is taken up again in one start."""
PAUSE_S = 3.0
_BLOCK = 8 * 2**20

log = get_logger(__name__)


@dataclass(frozen=True)
class HubFile:
    """A file as the hub describes it."""

    name: str
    size: int
    sha256: str
    """Empty for small files, which the hub keeps in git."""
    git_sha1: str

    def is_same(self, path: Path) -> bool:
        """Whether a file on disk has this size and hash."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % self.size)
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest() == (self.sha256 or self.git_sha1)


@dataclass(frozen=True)
class Source:
    """What is wanted of one repository."""

    kind: str
    """model: everything that transformers loads; tokenizer: that and the config."""
    repository: str
    revision: str | None

    def folder(self, base: Path) -> Path:
        """Where it lies."""
        return base / FOLDERS[self.kind] / self.repository


def parse_source(kind: str, text: str) -> Source:
    """A source from OWNER/NAME[@REVISION]. Raises RequestError for anything else."""
    repository, _, revision = text.partition("@")
    if not HUB_ID.fullmatch(repository):
        raise RequestError(repr(text), needed="OWNER/NAME or OWNER/NAME@REVISION", where=f"--{kind}")
    return Source(kind, repository, revision or None)


def list_files(source: Source) -> tuple[str, list[HubFile]]:
    """The commit of a source and the files wanted of it, by the hub. Raises RequestError when it can't be had."""
    from huggingface_hub import HfApi

    with hub_errors(source.repository, where=f"--{source.kind}"):
        info = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(
            source.repository, revision=source.revision, files_metadata=True
        )
    names = wanted_names([str(sibling.rfilename) for sibling in info.siblings or ()], source.kind)
    if not any(name == "config.json" or name.startswith("tokenizer") for name in names):
        raise RequestError(f"{source.repository} has neither config nor tokenizer", where=f"--{source.kind}")
    by_name = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    return str(info.sha), [_described(by_name[name]) for name in names]


def _described(sibling: Any) -> HubFile:
    sha256 = str(sibling.lfs["sha256"]) if sibling.lfs else ""
    return HubFile(str(sibling.rfilename), int(sibling.size), sha256, str(sibling.blob_id or ""))


def wanted_names(names: Sequence[str], kind: str) -> list[str]:
    """Of a repository's files those that are needed, in order."""
    if kind == "tokenizer":
        return sorted(name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in CONFIG_AND_TOKENIZER))
    unwanted = OTHER_WEIGHTS if any(name.endswith(".safetensors") for name in names) else ("original/*",)
    return sorted(name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in unwanted))


def fetch(source: Source, base: Path) -> Path:
    """The folder of a source, complete and verified; downloads what is missing.

    Raises RequestError when the hub has no such thing for this account, or the disk no room; DataError when what
    arrives isn't what the hub describes, twice.
    """
    folder = source.folder(base)
    if folder.exists():
        return verify(source, folder)
    commit, wanted = list_files(source)
    with _locked(folder.with_name(f".{folder.name}.lock"), source):
        if folder.exists():
            return verify(source, folder)
        # The name stays the same, so that the next start goes on with it.
        partial = folder.with_name(f".{folder.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        missing = sum(file.size for file in wanted if not (partial / file.name).is_file())
        if (free := shutil.disk_usage(partial).free) < missing:
            needed = f"{format_bytes(missing)} for {source.repository}"
            raise RequestError(f"{format_bytes(free)} free", needed=needed, where=str(base))
        log.info("%s: %d files, %s to come", source.repository, len(wanted), format_bytes(missing))
        for attempt in (1, 2):
            _download(source, commit, [file.name for file in wanted], partial)
            wrong = [file.name for file in wanted if not file.is_same(partial / file.name)]
            if not wrong:
                break
            _forget(partial, wrong)
            if attempt == 2:
                raise DataError(
                    f"{', '.join(wrong)} of {source.repository}: not what the hub describes, twice",
                    action="look at the disk and the proxy; the same command fetches them again",
                )
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        record = {"repository": source.repository, "commit": commit, "files": [asdict(file) for file in wanted]}
        files.write_json(partial / RECORD, record)
        files.commit(partial, folder)
    return folder


def _download(source: Source, commit: str, names: list[str], folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # Names are patterns here: one with brackets means itself all the same.
    patterns = [name.replace("[", "[[]") for name in names]
    with hub_errors(source.repository, where=f"--{source.kind}"):
        for left in reversed(range(TRIES)):
            try:
                snapshot_download(
                    source.repository,
                    revision=commit,
                    local_dir=folder,
                    allow_patterns=patterns,
                    endpoint=os.environ.get("HF_ENDPOINT"),
                )
                return
            except HfHubHTTPError:  # an answer; the library has tried again where that could help
                raise
            except OSError as error:
                if not left:
                    raise
                log.warning("%s: broken off, goes on: %s", source.repository, one_line(error))
                time.sleep(PAUSE_S)


def _forget(folder: Path, names: list[str]) -> None:
    """Remove wrong files together with what the hub's library remembers of them."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / ".cache" / "huggingface" / "download" / f"{name}.metadata").unlink(missing_ok=True)


def verify(source: Source, folder: Path) -> Path:
    """A folder that is there, when its files are as its record says; needs no network. Raises DataError otherwise."""
    action = f"remove {folder} and fetch it again"
    if not (folder / RECORD).is_file():
        raise RequestError(f"{folder} is there, without {RECORD}", action=action, where=f"--{source.kind}")
    record = files.read_json(folder / RECORD)
    if source.revision and not str(record["commit"]).startswith(source.revision):
        log.warning("%s is at commit %s; whether that is %s isn't asked", folder, record["commit"], source.revision)
    wrong = [file["name"] for file in record["files"] if not HubFile(**file).is_same(folder / file["name"])]
    if wrong:
        raise DataError(f"{folder}: not as fetched: {', '.join(wrong)}", action=action)
    log.info("%s is there: %d files as the hub described them", folder, len(record["files"]))
    return folder


@contextmanager
def _locked(path: Path, source: Source) -> Iterator[None]:
    """Only one process fetches a source."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.locked(path):
            yield
        path.unlink(missing_ok=True)  # whoever locks another file of this name now finds the folder complete
    except files.LockHeldError as error:
        raise PretrainkitError(f"another process fetches {source.repository}: {error}") from None
