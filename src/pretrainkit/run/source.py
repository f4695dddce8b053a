"""source.txt: what code, packages, data and command an attempt ran with, so that it can be had again."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import stat
import subprocess
import threading
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from fnmatch import fnmatch
from pathlib import Path

from pretrainkit import files
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import masked
from pretrainkit.machine import installed_version

PACKAGES = (
    "pretrainkit",
    "torch",
    "nemo_toolkit",
    "megatron-core",
    "nemo-run",
    "lightning",
    "transformers",
    "tokenizers",
    "fastokens",
    "transformer-engine",
    "liger-kernel",
    "triton",
    "numpy",
    "omegaconf",
)
"""Packages whose versions can change a result."""
MAX_DIFF_BYTES = 2_000_000
"""What is kept of the changes, new files included: more is generated files or data, not source."""
MAX_UNTRACKED = 10_000
"""Untracked files that are looked at and listed, so that a checkout full of outputs doesn't hold up a start."""
_SECRET_FILES = (".env*", ".netrc", "*.pem", "*.key")
"""Names of files that are text and no source; they are listed only, since others read source.txt."""
_HEAD_BYTES = 8000
"""A file with a NUL in as many bytes is binary, as git sees it."""
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
"""Whatever the user's settings, a diff that `git apply` takes."""
_GIT_TIMEOUT_S = 20


def describe(run: ResolvedRun, command_line: Sequence[str]) -> str:
    """The text of source.txt. Values of token variables are replaced by ***."""
    tokenizer = Path(run.hf_folder) / "tokenizer.json"
    data = [
        f"data {run.dataset.data_hash}",
        *(f"  {prefix}" for prefix in run.dataset.prefixes),
        f"tokenizer {files.sha256_file(tokenizer) if tokenizer.is_file() else 'without a tokenizer.json'}",
        f"  {run.hf_folder}",
        "",
    ]
    return describe_source(command_line, data)


def describe_source(command_line: Sequence[str], data: Sequence[str] = ()) -> str:
    """The same of a command that trains nothing; `data`: lines about what it reads."""
    parts = [
        f"written {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC",
        f"command: {shlex.join(command_line)}",
        f"python {platform.python_version()}",
        *(f"{name} {installed_version(name) or 'not installed'}" for name in PACKAGES),
        "",
        *data,
        *_repository(Path(__file__).parents[3]),
    ]
    return masked("\n".join(parts) + "\n")


def _repository(root: Path) -> list[str]:
    """Commit, untracked files and uncommitted changes of the checkout that holds this package.

    The changes, text of untracked files included, are such that `git apply source.txt` makes them on the commit.
    """
    if not (root / ".git").exists():
        return ["source: an installed package, not a git checkout"]
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return ["source: a git checkout that git can't read here"]
    diff, listed = _git(root, *_DIFF), _git(root, "ls-files", "-z", "--others", "--exclude-standard")
    names = [os.fsdecode(name) for name in (listed or b"").split(b"\0")[:-1]]
    more, names = names[MAX_UNTRACKED:], names[:MAX_UNTRACKED]
    added = _added(root, names, MAX_DIFF_BYTES - len(diff or b""))
    untracked = [_quoted(name) + ("" if name in added else " (listed only)") for name in names]
    changes = (diff or b"")[:MAX_DIFF_BYTES].decode(errors="replace") + "".join(
        added[name] for name in names if name in added
    )
    if diff and len(diff) > MAX_DIFF_BYTES:
        changes += f"\n[cut: the diff has more than {MAX_DIFF_BYTES} bytes]"
    return [
        f"commit {commit.decode().strip()}",
        "untracked: " + ("git can't list them here" if listed is None else "as follows" if untracked else "nothing"),
        *(f"  {line}" for line in untracked),
        *(["  and more"] if more or len(listed or b"") > MAX_DIFF_BYTES else []),
        "uncommitted changes: "
        + ("git can't tell those of tracked files here" if diff is None else "as follows" if changes else "none"),
        *([changes] if changes else []),
    ]


def _added(root: Path, names: Iterable[str], room: int) -> dict[str, str]:
    """Untracked text files as parts of a diff, by name: the smallest first, as many as have room (bytes)."""
    sizes: dict[str, int] = {}
    for name in names:
        with contextlib.suppress(OSError):  # it is gone by now
            sizes[name] = (root / name).lstat().st_size
    added: dict[str, str] = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        if size > room:
            break
        part = _as_added(root / name, name)
        if part and (length := len(part.encode())) <= room:
            added[name], room = part, room - length
    return added


def _as_added(path: Path, name: str) -> str:
    """An untracked text file or link as git writes a new file in a diff; empty for other files."""
    if any(fnmatch(path.name, pattern) for pattern in _SECRET_FILES):
        return ""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            kind, text = "120000", os.fsencode(path.readlink()).decode()
        elif stat.S_ISREG(mode):
            kind, text = "100755" if mode & stat.S_IXUSR else "100644", _text(path)
        else:
            return ""
    except (OSError, UnicodeDecodeError):
        return ""
    if "\0" in text:
        return ""
    old, new = _quoted(f"a/{name}"), _quoted(f"b/{name}")
    header = f"diff --git {old} {new}\nnew file mode {kind}\n"
    if not text:
        return header
    lines = text.removesuffix("\n").split("\n")
    added = "".join(f"+{line}\n" for line in lines)
    end = "" if text.endswith("\n") else "\\ No newline at end of file\n"
    tab = "\t" if " " in new else ""  # else a name would end at its space
    return f"{header}--- /dev/null\n+++ {new}{tab}\n@@ -0,0 +1,{len(lines)} @@\n{added}{end}"


def _text(path: Path) -> str:
    """A file's text, or a NUL where it is binary; UnicodeDecodeError where it isn't UTF-8."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        return "\0" if b"\0" in head else (head + file.read(MAX_DIFF_BYTES)).decode()


def _quoted(name: str) -> str:
    """A name as git writes it in a diff: odd ones in double quotes, with escapes."""
    if name.isprintable() and not {'"', "\\"} & set(name):
        return name
    escaped = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in os.fsencode(name))
    return f'"{"".join(escaped)}"'


def _git(root: Path, *words: str) -> bytes | None:
    """The first MAX_DIFF_BYTES + 1 bytes that a git command prints; None when it fails or takes too long."""
    try:
        process = subprocess.Popen(["git", "-C", str(root), *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    timer = threading.Timer(_GIT_TIMEOUT_S, process.terminate)  # git then removes its locks
    timer.start()
    try:
        with process:
            assert process.stdout
            output = process.stdout.read(MAX_DIFF_BYTES + 1)
            if is_cut := len(output) > MAX_DIFF_BYTES:
                process.terminate()
    finally:
        timer.cancel()
    return output if is_cut or process.returncode == 0 else None
