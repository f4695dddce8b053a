"""A small server that speaks the hub's protocol: accounts, repositories, branches, preupload, LFS, commits, files.

The name of a repository of a dataset begins with `datasets/`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

NAME = r"((?:datasets/)?[^/]+/[^/]+)"
TOKEN, READ_TOKEN = "hf_" + "w" * 34, "hf_" + "r" * 34


@dataclass
class HubRepository:
    """A repository: its branches, each a list of (commit, files by path)."""

    private: bool
    branches: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        commits = self.branches.setdefault(branch, [])
        oid = hashlib.sha1(f"{branch} {len(commits)} {sorted(files)}".encode()).hexdigest()
        commits.append((oid, files))
        return oid

    def find(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The head of a branch, or a commit."""
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((each for commits in self.branches.values() for each in commits if each[0] == revision), None)


class HubServer(ThreadingHTTPServer):
    """Serves until `close`; what it has is in `repositories` and `storage`, what it was asked in `requests`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, HubRepository] = {}
        self.storage: dict[str, bytes] = {}
        """LFS objects by SHA-256."""
        self.requests: list[str] = []
        self.uploads: list[str] = []
        """SHA-256 of each object whose bytes came, whole."""
        self.dropped_uploads = 0
        """How many of the next uploads end in the middle, without an answer."""
        self.blocked_upload: threading.Event | None = None
        """If set, uploads after the first wait for it; `is_blocked` says that one does."""
        self.is_blocked = threading.Event()
        self.drops_commit_answer = False
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def add(self, name: str, files: dict[str, bytes] | None = None, *, private: bool = True) -> HubRepository:
        """Make a repository as the hub does, with its own first commit and a further one of `files`."""
        self.repositories[name] = repository = HubRepository(private)
        first = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
        repository.commit("main", first)
        if files:
            repository.commit("main", first | files)
        return repository


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._route()

    do_POST = do_PUT = do_HEAD = do_GET

    def _route(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.server.requests.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/storage/(\w+)", path):
            return self._put(match[1])
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in (TOKEN, READ_TOKEN):
            return self._answer({"error": "Invalid credentials"}, 401)
        self._can_write = token == TOKEN
        if path == "/api/whoami-v2":
            role = "write" if self._can_write else "read"
            return self._answer({"name": "lab", "auth": {"accessToken": {"role": role}}})
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        path = path.replace("/api/models/", "/api/", 1)
        for pattern, answer in (
            (rf"/api/{NAME}/preupload/(.+)", self._preupload),
            (rf"/api/{NAME}/commit/(.+)", self._commit),
            (rf"/api/{NAME}/branch/(.+)", self._branch),
            (rf"/api/{NAME}/paths-info/(.+)", self._paths_info),
            (rf"/api/{NAME}/tree/(.+)", self._tree),
            (rf"/api/{NAME}(?:/revision/(.+))?", self._info),
            (rf"/{NAME}\.git/info/lfs/objects/batch()", self._batch),
            (rf"/{NAME}/resolve/(.+)", self._file),
        ):
            if match := re.fullmatch(pattern, path):
                repository = self.server.repositories.get(match[1])
                if repository is None or (repository.private and not token):
                    return self._error(404, "RepoNotFound")
                if self.command in ("POST", "PUT") and answer != self._paths_info and not self._can_write:
                    return self._answer({"error": "You have read access only"}, 403)
                return answer(repository, match[2] or "main", body)
        return self._error(404, "EntryNotFound")

    def _answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _error(self, status: int, code: str) -> None:
        self._answer({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _create(self, request: dict[str, Any]) -> None:
        if not self._can_write or request["organization"] != "lab":
            return self._answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
        name = f"{request['organization']}/{request['name']}"
        if name in self.server.repositories:
            return self._answer({"error": "You already created this model repo"}, 409)
        self.server.add(name, private=request.get("visibility") == "private")
        return self._answer({"url": f"{self.server.url}/{name}", "name": name})

    def _branch(self, repository: HubRepository, revision: str, body: bytes) -> None:
        repository.branches[revision] = list(repository.branches["main"])
        self._answer({})

    def _info(self, repository: HubRepository, revision: str, body: bytes) -> None:
        found = repository.find(revision)
        if found is None:
            return self._error(404, "RevisionNotFound")
        siblings = []
        for name, content in found[1].items():
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            each: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git}
            if _is_lfs(name):
                sha256 = hashlib.sha256(content).hexdigest()
                each["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(each)
        self._answer(
            {"id": self._name_of(repository), "sha": found[0], "private": repository.private, "siblings": siblings}
        )

    def _paths_info(self, repository: HubRepository, revision: str, body: bytes) -> None:
        found = repository.find(revision)
        if found is None:
            return self._error(404, "RevisionNotFound")
        asked = parse_qs(body.decode())["paths"]
        self._answer([each for each in _entries(found[1]) if each["path"] in asked])

    def _tree(self, repository: HubRepository, place: str, body: bytes) -> None:
        """What is in a folder itself; `?recursive=true` isn't asked for."""
        revision, _, folder = place.partition("/")
        found = repository.find(revision)
        if found is None:
            return self._error(404, "RevisionNotFound")
        self._answer([each for each in _entries(found[1]) if each["path"].rpartition("/")[0] == folder])

    def _file(self, repository: HubRepository, place: str, body: bytes) -> None:
        revision, _, name = place.partition("/")
        found = repository.find(revision)
        if found is None or name not in found[1]:
            return self._error(404, "EntryNotFound" if found else "RevisionNotFound")
        content = found[1][name]
        etag = hashlib.sha1(content).hexdigest()
        self._answer(content, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": found[0]})

    def _preupload(self, repository: HubRepository, revision: str, body: bytes) -> None:
        names = [each["path"] for each in json.loads(body)["files"]]
        modes = [
            {"path": name, "uploadMode": "lfs" if _is_lfs(name) else "regular", "shouldIgnore": False, "oid": None}
            for name in names
        ]
        self._answer({"files": modes})

    def _batch(self, repository: HubRepository, _: str, body: bytes) -> None:
        objects = []
        for each in json.loads(body)["objects"]:
            found: dict[str, Any] = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.server.storage:
                found["actions"] = {"upload": {"href": f"{self.server.url}/storage/{each['oid']}"}}
            objects.append(found)
        self._answer({"transfer": "basic", "objects": objects})

    def _put(self, oid: str) -> None:
        server = self.server
        length = int(self.headers["Content-Length"])
        if server.blocked_upload and server.uploads:
            self.rfile.read(length // 2)
            server.is_blocked.set()
            server.blocked_upload.wait(30)
            return self._drop()
        if server.dropped_uploads:
            server.dropped_uploads -= 1
            self.rfile.read(length // 2)
            return self._drop()
        content = self.rfile.read(length)
        if hashlib.sha256(content).hexdigest() != oid:
            return self._answer({"error": "the content has another SHA-256"}, 400)
        server.storage[oid] = content
        server.uploads.append(oid)
        return self._answer(b"")

    def _commit(self, repository: HubRepository, revision: str, body: bytes) -> None:
        head = repository.find(revision)
        assert head
        files, lines = dict(head[1]), [json.loads(line) for line in body.splitlines()]
        parent = lines[0]["value"].get("parentCommit")
        if parent is not None and parent != head[0]:
            return self._answer({"error": "A commit has happened since. Please refresh and try again."}, 412)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.storage[value["oid"]]
            else:
                assert line["key"] == "deletedFile", line
                del files[value["path"]]
        oid = repository.commit(revision, files)
        if self.server.drops_commit_answer:
            return self._drop()
        url = f"{self.server.url}/{self._name_of(repository)}/commit/{oid}"
        return self._answer({"success": True, "commitOid": oid, "commitUrl": url})

    def _name_of(self, repository: HubRepository) -> str:
        return next(name for name, each in self.server.repositories.items() if each is repository)


def _is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


def _entries(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Files and folders of a commit, as the hub lists them."""
    folders = {name[:end] for name in files for end in range(len(name)) if name[end] == "/"}
    listed: list[dict[str, Any]] = [{"type": "directory", "path": name, "oid": "", "size": 0} for name in folders]
    for name, content in files.items():
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        listed.append({"type": "file", "path": name, "oid": oid, "size": len(content)})
    return listed
