"""Downloads from the Hugging Face hub: config and tokenizer to its cache, or models to a folder on a group disk.

`local_folder` is for every command that takes a model id. `fetch` is for nodes without internet: a model goes to
DIR/models/OWNER/NAME, a tokenizer with its config to DIR/tokenizers/OWNER/NAME, plain folders for --hf_model_id,
--nemo_model and --tokenizer-model. Such a folder appears when every file has the size and the hash that the hub
gives; prefetched.json in it holds the commit and those hashes. An interrupted download goes on with the files that
are missing. huggingface_hub finds the token: HF_TOKEN, or that of `hf auth login`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import DataError, PretrainkitError, RequestError, one_line
from pretrainkit.logs import get_logger, masked
from pretrainkit.units import format_bytes

CONFIG_AND_TOKENIZER = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
"""Files of a model repository that are not weights."""
OTHER_WEIGHTS = ("original/*", "*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot")
"""Weights in other formats, left out where there are safetensors."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(?<!\.json)")
"""The form of a model's name on the hub; a name that ends like a file is none."""
RECORD = "prefetched.json"
KINDS = ("model", "tokenizer")

LOGGER = get_logger(__name__)


def local_folder(hf_model_id: str, *, where: str = "--hf_model_id") -> Path:
    """The absolute folder of a model: the folder itself, or its config and tokenizer from the hub's cache.

    Only what is missing in the cache is downloaded, never weights. HF_TOKEN and HF_HUB_OFFLINE are respected.
    Raises RequestError when there is no such folder or repository, or the hub can't be reached.
    """
    folder = Path(hf_model_id).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if not HUB_ID.fullmatch(hf_model_id):
        raise RequestError(
            f"no folder {hf_model_id}, and it can't be a model id of the hub",
            needed="a local folder, or an id of the form owner/name",
            where=where,
        )
    return _download(hf_model_id, CONFIG_AND_TOKENIZER, where=where)


def _download(
    repository: str,
    patterns: Sequence[str],
    *,
    where: str,
    revision: str | None = None,
    folder: Path | None = None,
    force: bool = False,
) -> Path:
    """Download the files of a repository that match to `folder`, or to the hub's cache; gives where they are."""
    from huggingface_hub import snapshot_download

    with _hub_errors(repository, where=where):
        found = snapshot_download(
            repository,
            revision=revision,
            local_dir=folder,
            allow_patterns=list(patterns),
            force_download=force,
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    return Path(found)


@contextmanager
def _hub_errors(repository: str, *, where: str) -> Iterator[None]:
    """Turn errors of the hub's client into a RequestError that says what to do."""
    import httpx
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def refusal(found: str, action: str = "") -> RequestError:
        return RequestError(found, action=action, where=where)

    try:
        yield
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.TransportError) as error:
        is_offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "")
        why = "HF_HUB_OFFLINE is set" if is_offline else "the hub can't be reached"
        raise refusal(
            f"{repository} is no local folder and not in the hub's cache, and {why}",
            f"fetch it on a machine with network: scripts/prefetch.sh --dir FOLDER --model {repository}, then "
            f"use FOLDER/models/{repository}",
        ) from error
    except GatedRepoError as error:
        action = "ask for access on its page on the hub, and set HF_TOKEN to a token of that account"
        raise refusal(f"{repository} is gated and this account has no access to it", action) from error
    except RepositoryNotFoundError as error:
        action = "check the spelling; for a private model set HF_TOKEN; for a folder check the path"
        raise refusal(f"no model {repository} on the hub, or it is private", action) from error
    except RevisionNotFoundError as error:
        raise refusal(f"{repository} has no such revision", "name a branch, a tag or a commit") from error
    except (OSError, ValueError) as error:
        raise refusal(masked(f"{repository} can't be downloaded: {error}")) from error


@dataclass(frozen=True)
class HubFile:
    """A file as the hub describes it."""

    name: str
    size: int
    sha256: str
    """Empty for small files, which the hub keeps in git."""
    git_sha1: str

    def matches(self, path: Path) -> bool:
        """Whether a file on disk has this size and hash."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % self.size)
        return files.hash_file(path, lambda: digest) == (self.sha256 or self.git_sha1)


@dataclass(frozen=True)
class Repository:
    """A repository to fetch, as a model or as a tokenizer."""

    kind: str
    """model: everything that transformers loads; tokenizer: that and the config, without weights."""
    name: str
    revision: str | None

    def folder(self, base: Path) -> Path:
        """Its folder below `base`."""
        return base / f"{self.kind}s" / self.name


def parse_repository(kind: str, text: str) -> Repository:
    """A repository from OWNER/NAME[@REVISION]. Raises RequestError for anything else."""
    name, _, revision = text.partition("@")
    if not HUB_ID.fullmatch(name):
        raise RequestError(repr(text), needed="OWNER/NAME or OWNER/NAME@REVISION", where=f"--{kind}")
    return Repository(kind, name, revision or None)


def list_files(repository: Repository) -> tuple[str, list[HubFile]]:
    """A repository's commit and the files to fetch, as the hub lists them. Raises RequestError if it can't be asked."""
    from huggingface_hub import HfApi

    with _hub_errors(repository.name, where=f"--{repository.kind}"):
        info = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(
            repository.name, revision=repository.revision, files_metadata=True
        )
    by_name: dict[str, Any] = {str(sibling.rfilename): sibling for sibling in info.siblings or ()}
    names = wanted_names(list(by_name), repository.kind)
    if not any(name == "config.json" or name.startswith("tokenizer") for name in names):
        raise RequestError(f"{repository.name} has neither config nor tokenizer", where=f"--{repository.kind}")
    return str(info.sha), [
        HubFile(
            name,
            size=int(by_name[name].size),
            sha256=str(by_name[name].lfs["sha256"]) if by_name[name].lfs else "",
            git_sha1=str(by_name[name].blob_id or ""),
        )
        for name in names
    ]


def wanted_names(names: Sequence[str], kind: str) -> list[str]:
    """The names of a repository's files that are needed, sorted."""
    from huggingface_hub.utils import filter_repo_objects

    if kind == "tokenizer":
        return sorted(filter_repo_objects(names, allow_patterns=list(CONFIG_AND_TOKENIZER)))
    unwanted = OTHER_WEIGHTS if any(name.endswith(".safetensors") for name in names) else ("original/*",)
    return sorted(filter_repo_objects(names, ignore_patterns=list(unwanted)))


def fetch(repository: Repository, base: Path) -> Path:
    """The folder of a repository below `base`, complete and verified; downloads what is missing.

    Raises RequestError when the hub has no such repository for this account, or the disk has too little space;
    DataError when the files that arrive differ twice from what the hub describes.
    """
    folder = repository.folder(base)
    if folder.exists():
        return verify(repository, folder)
    commit, wanted = list_files(repository)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        with files.locked(lock):
            if folder.exists():
                return verify(repository, folder)
            _fetch_all(repository, commit, wanted, folder)
    except files.LockHeldError as error:
        raise PretrainkitError(f"another process fetches {repository.name}: {error}") from None
    lock.unlink(missing_ok=True)  # whoever locks another file of this name now finds the folder complete
    return folder


def _fetch_all(repository: Repository, commit: str, wanted: list[HubFile], folder: Path) -> None:
    # The same name every time, so that the next start resumes.
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    missing = sum(file.size for file in wanted if not (partial / file.name).is_file())
    if (free := shutil.disk_usage(partial).free) < missing:
        raise RequestError(
            f"{format_bytes(free)} free",
            needed=f"{format_bytes(missing)} for {repository.name}",
            where=str(folder.parent),
        )
    LOGGER.info("%s: %d files, %s to download", repository.name, len(wanted), format_bytes(missing))
    wrong = wanted
    for is_again in (False, True):
        if wrong:
            _download_files(repository, commit, wrong, partial, force=is_again)
            wrong = [file for file in wrong if not file.matches(partial / file.name)]
    if wrong:
        raise DataError(
            f"{', '.join(file.name for file in wrong)} of {repository.name}: not what the hub describes, twice",
            action="check the disk and the proxy; the same command fetches them again",
        )
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    record = {"repository": repository.name, "commit": commit, "files": [asdict(file) for file in wanted]}
    files.write_json(partial / RECORD, record)
    files.commit(partial, folder)


def _download_files(repository: Repository, commit: str, wanted: list[HubFile], folder: Path, *, force: bool) -> None:
    """Download files to a folder; what is missing after an interruption is tried once more."""
    patterns = [file.name.replace("[", "[[]") for file in wanted]  # names, so brackets have no meaning
    options: dict[str, Any] = {"where": f"--{repository.kind}", "revision": commit, "folder": folder, "force": force}
    try:
        _download(repository.name, patterns, **options)
    except RequestError as error:
        LOGGER.warning("%s: interrupted, trying again: %s", repository.name, one_line(error))
        _download(repository.name, patterns, **options)


def verify(repository: Repository, folder: Path) -> Path:
    """A folder that exists, if its files match its record; needs no network. Raises DataError otherwise."""
    action = f"remove {folder} and fetch it again"
    if not (folder / RECORD).is_file():
        raise RequestError(f"{folder} exists without {RECORD}", action=action, where=f"--{repository.kind}")
    record = files.read_json(folder / RECORD)
    revision, commit = repository.revision, str(record["commit"])
    if revision and not commit.startswith(revision):
        LOGGER.warning("%s has commit %s; not checked whether that is %s", folder, commit, revision)
    wrong = [file["name"] for file in record["files"] if not HubFile(**file).matches(folder / file["name"])]
    if wrong:
        raise DataError(f"{folder}: not as fetched: {', '.join(wrong)}", action=action)
    LOGGER.info("%s exists: %d files as the hub described them", folder, len(record["files"]))
    return folder
