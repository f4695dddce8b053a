"""The upload of a release that passed the gate, as one commit of a repository on the Hugging Face hub.

Weights are uploaded first, and then one commit adds all files: a reader sees the old revision or the whole release. An
interrupted upload leaves no commit; run again, it uploads what the hub doesn't have. (huggingface_hub's
upload_large_folder makes a commit for every few files, and writes its state into the folder, which the gate refuses.)
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrainkit.checkpoint.formats.hf_files import is_weight_file
from pretrainkit.errors import DataError, PretrainkitError, RequestError
from pretrainkit.files import hash_file
from pretrainkit.logs import get_logger, masked
from pretrainkit.release.files import MODEL_CARD
from pretrainkit.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_OF_THE_HUB = ".gitattributes"
"""The file that the hub makes in a new repository."""

log = get_logger(__name__)


@dataclass(frozen=True)
class ReleaseFile:
    """A file to be published."""

    name: str
    size: int
    sha256: str
    source: Path | bytes
    """Weights are read while they are uploaded; of other files the content was read when they were compared."""

    @classmethod
    def of(cls, name: str, content: bytes) -> ReleaseFile:
        """A file with this content."""
        return cls(name, len(content), hashlib.sha256(content).hexdigest(), content)

    def is_on_hub(self, sibling: Any) -> bool:
        """Whether the hub's description of a file is that of this one."""
        if sibling.size != self.size:
            return False
        if sibling.lfs:
            return bool(sibling.lfs["sha256"] == self.sha256)
        git = hashlib.sha1(b"blob %d\0" % self.size)  # the hub keeps small files in git
        if isinstance(self.source, bytes):
            git.update(self.source)
            return bool(sibling.blob_id == git.hexdigest())
        return bool(sibling.blob_id == hash_file(self.source, lambda: git))


@dataclass(frozen=True)
class Destination:
    """Where a release goes."""

    repository: str
    """OWNER/NAME"""
    revision: str
    """Branch."""
    private: bool
    overwrite: bool
    """Whether other files of the branch may be replaced and removed by the commit."""


@dataclass(frozen=True)
class Remote:
    """A branch as the hub has it."""

    commit: str | None
    """None: the repository has no such branch."""
    siblings: dict[str, Any]


@dataclass(frozen=True)
class Published:
    """What was published."""

    url: str
    commit: str


def release_files(released: Path, hashes: dict[str, str]) -> list[ReleaseFile]:
    """The files of a release but for its card. Raises RequestError where one isn't what its hash says."""
    files = []
    for name, sha256 in sorted(hashes.items()):
        path = released / name
        if name == MODEL_CARD:
            continue
        if is_weight_file(path):
            files.append(ReleaseFile(name, path.stat().st_size, sha256, path))
        elif (file := ReleaseFile.of(name, path.read_bytes())).sha256 == sha256:
            files.append(file)
        else:
            raise RequestError(f"{name} changed while it was read", where=str(released))
    return files


def connect(destination: Destination) -> HfApi:
    """The hub's client, once the token is known to be valid. Raises RequestError otherwise."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    with hub_errors(destination.repository):
        account = api.whoami()
    role = (account.get("auth") or {}).get("accessToken", {}).get("role")
    if role == "read":
        raise RequestError(
            f"a token of {account.get('name')} that may only read",
            needed="one that may write",
            action="make one on the hub's page of access tokens",
            where="HF_TOKEN",
        )
    return api


def look_at(api: HfApi, destination: Destination) -> Remote | None:
    """The branch on the hub; None where there is no repository. Raises RequestError where its visibility is another."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    name = destination.repository
    with hub_errors(name):
        try:
            info = api.model_info(name)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return None
        if bool(info.private) != destination.private:
            is_now = "private" if info.private else "public"
            raise RequestError(
                f"{name} exists and is {is_now}",
                needed="--public, if everyone may read it" if not info.private else "no --public",
                action="name another repository, or change its visibility on its page first",
                where="REPO",
            )
        try:
            info = api.model_info(name, revision=destination.revision, files_metadata=True)
        except RevisionNotFoundError:
            return Remote(None, {})
    return Remote(info.sha, {str(each.rfilename): each for each in info.siblings or ()})


def read_card(api: HfApi, destination: Destination, remote: Remote | None) -> str | None:
    """The card that the branch has, if it has one."""
    if remote is None or MODEL_CARD not in remote.siblings:
        return None
    with hub_errors(destination.repository):
        path = api.hf_hub_download(destination.repository, MODEL_CARD, revision=remote.commit)
    return Path(path).read_text(encoding="utf-8")


def other_content(remote: Remote, files: Sequence[ReleaseFile]) -> list[str]:
    """The files of a branch that the release doesn't have, or has otherwise."""
    ours = {file.name: file for file in files}
    return sorted(
        name
        for name, sibling in remote.siblings.items()
        if name != _OF_THE_HUB and not (name in ours and ours[name].is_on_hub(sibling))
    )


def is_published(remote: Remote, files: Sequence[ReleaseFile]) -> bool:
    """Whether a branch has the files of a release and no others."""
    return not other_content(remote, files) and all(file.name in remote.siblings for file in files)


def publish(
    api: HfApi, destination: Destination, remote: Remote | None, files: Sequence[ReleaseFile], message: str
) -> Published:
    """Make repository and branch where they are missing, upload, commit, and compare what the hub has then.

    The branch has no other content, or may be overwritten. Raises PretrainkitError when the connection is lost, or the
    branch was changed meanwhile; DataError when a file was.
    """
    from httpx import TransportError

    name, revision = destination.repository, destination.revision
    with hub_errors(name):
        if remote is None:
            api.create_repo(name, private=destination.private, repo_type="model")
            log.info("made the %s repository %s", "private" if destination.private else "public", name)
            remote = look_at(api, destination)
            assert remote, "it was just made"
        if remote.commit is None:
            api.create_branch(name, branch=revision)
            remote = look_at(api, destination)
            assert remote and remote.commit, "it was just made"
        operations = _upload(api, destination, files)
        kept = {_OF_THE_HUB, *(file.name for file in files)}
        operations += _deletions(set(remote.siblings) - kept)
        try:
            api.create_commit(name, operations, commit_message=message, revision=revision, parent_commit=remote.commit)
        except TransportError:
            found = look_at(api, destination)  # the commit may have been made, and only its answer lost
            if not found or not is_published(found, files):
                raise
    found = look_at(api, destination)
    if not found or not found.commit or not is_published(found, files):
        different = other_content(found, files) if found else []
        raise DataError(
            f"the hub doesn't have what was uploaded: {', '.join(different) or 'files are missing'}",
            action="look at the repository's history before you run this again",
            where=name,
        )
    return Published(f"{api.endpoint}/{name}/tree/{revision}", found.commit)


def _upload(api: HfApi, destination: Destination, files: Sequence[ReleaseFile]) -> list[Any]:
    """Upload what isn't in the hub's storage yet, the commit excepted; gives its operations."""
    from huggingface_hub import CommitOperationAdd

    operations = [
        CommitOperationAdd(file.name, file.source if isinstance(file.source, bytes) else str(file.source))
        for file in files
    ]
    total, done = sum(file.size for file in files), 0
    for number, (file, operation) in enumerate(zip(files, operations, strict=True), 1):
        # One at a time: others would go on in threads after a signal. Xet itself sends a file's chunks in parallel.
        api.preupload_lfs_files(
            destination.repository, [operation], revision=destination.revision, free_memory=False, num_threads=1
        )
        if operation.upload_info.sha256.hex() != file.sha256:
            raise DataError(
                f"{file.name} changed after the gate, while it was uploaded; nothing was committed",
                action="run the gate again",
                where=destination.repository,
            )
        done += file.size
        log.info("%d of %d files, %s of %s: %s", number, len(files), format_bytes(done), format_bytes(total), file.name)
    return list(operations)


def _deletions(names: set[str]) -> list[Any]:
    from huggingface_hub import CommitOperationDelete

    return [CommitOperationDelete(name) for name in sorted(names)]


@contextmanager
def hub_errors(repository: str) -> Iterator[None]:
    """Turn errors of the hub's client into ours."""
    import httpx
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    token = "set HF_TOKEN to a token that may write, or run `hf auth login`"
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise RequestError("no access token for the hub", action=token, where="HF_TOKEN") from error
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise RequestError(
            "this account has no access to it", action=f"check the owner's name; {token}", where=repository
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        said = masked(str(error).strip().splitlines()[-1])
        if status in (401, 403):
            found = "the token is not valid" if status == 401 else f"this account may not write there: {said}"
            raise RequestError(found, action=token, where="HF_TOKEN" if status == 401 else repository) from error
        if status in (409, 412):
            action = "look at what was committed; this command compares with it"
            raise PretrainkitError(
                f"the branch was changed meanwhile: {said}", action=action, where=repository
            ) from error
        raise PretrainkitError(
            f"the hub refused: {said}", action="run the same command again", where=repository
        ) from error
    except OfflineModeIsEnabled as error:
        raise RequestError(
            "HF_HUB_OFFLINE is set", action="publish where there is a network", where=repository
        ) from error
    except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: a file's upload, with its cause
        cause = error.__cause__ or error
        raise PretrainkitError(
            masked(f"the connection to the hub was lost: {cause}"),
            action="run the same command again: it uploads only what the hub doesn't have yet",
            where=repository,
        ) from error
    except (OSError, ValueError) as error:
        no_xet = "this hub has no Xet storage: set HF_HUB_DISABLE_XET=1" if "xet-write-token" in str(error) else ""
        raise PretrainkitError(masked(f"the hub refused: {error}"), action=no_xet, where=repository) from error
