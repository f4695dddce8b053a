"""source.txt: the code, packages, data and command of an attempt, so that it can be reproduced."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
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
"""Size limit of the recorded changes, new files included: more is generated files or data, not source."""
MAX_UNTRACKED = 10_000
"""Limit of untracked files that are read and listed, so that a checkout full of outputs doesn't delay a start."""
_SECRET_FILES = (".env*", ".netrc", "*.pem", "*.key")
"""Untracked files that are listed but not copied, since others read source.txt."""
_DIFF = ("diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
"""A diff that `git apply` accepts, whatever the user's settings."""
_HEADER_BYTES = 400
"""More than git adds to the text of a new file in a diff, except for one of very short lines (assumed)."""
_GIT_TIMEOUT_S = 20


def describe(run: ResolvedRun, command_line: Sequence[str]) -> str:
    """The text of source.txt. Values of token variables are replaced by ***."""
    tokenizer = Path(run.hf_folder) / "tokenizer.json"
    datasets = (
        [f"data {dataset.data_hash}", *(f"  {prefix}" for prefix in dataset.prefixes)] for dataset in run.datasets
    )
    data = [
        *itertools.chain(*datasets),
        f"tokenizer {files.hash_file(tokenizer) if tokenizer.is_file() else 'without a tokenizer.json'}",
        f"  {run.hf_folder}",
        "",
    ]
    return describe_source(command_line, data)


def describe_source(command_line: Sequence[str], data: Sequence[str] = ()) -> str:
    """The same for a command that doesn't train; `data`: lines about what it reads."""
    parts = [
        f"written {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        f"command: {shlex.join(command_line)}",
        f"python {platform.python_version()}",
        *(f"{name} {installed_version(name) or 'not installed'}" for name in PACKAGES),
        "",
        *data,
        *_repository(Path(__file__).parents[3]),
    ]
    return masked("\n".join(parts) + "\n")


def _repository(root: Path) -> list[str]:
    """Commit, untracked files and uncommitted changes of the checkout that contains this package.

    `git apply source.txt` makes the changes, new text files included, on the commit.
    """
    if not (root / ".git").exists():
        return ["source: an installed package, not a git checkout"]
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return ["source: a git checkout that git can't read here"]
    diff, listed = _git(root, *_DIFF, "HEAD"), _git(root, "ls-files", "-z", "--others", "--exclude-standard")
    names = [os.fsdecode(name) for name in (listed or b"").split(b"\0")[:-1]]
    more, names = names[MAX_UNTRACKED:], names[:MAX_UNTRACKED]
    copied = _small_text_files(root, names, MAX_DIFF_BYTES - len(diff or b""))
    added = _diff_of_new(root, copied) if copied else b""
    changes = ((diff or b"")[:MAX_DIFF_BYTES] + (added or b"")).decode(errors="replace")
    if diff and len(diff) > MAX_DIFF_BYTES:
        changes += f"\n[cut: the diff has more than {MAX_DIFF_BYTES} bytes]"
    return [
        f"commit {commit.decode().strip()}",
        "untracked: " + ("git can't list them here" if listed is None else "as follows" if names else "nothing"),
        *(
            f"  {name if name.isprintable() else ascii(name)}{'' if added and name in copied else ' (listed only)'}"
            for name in names
        ),
        *(["  and more"] if more or len(listed or b"") > MAX_DIFF_BYTES else []),
        "uncommitted changes: "
        + ("git can't read those of tracked files here" if diff is None else "as follows" if changes else "none"),
        *([changes] if changes else []),
    ]


def _small_text_files(root: Path, names: Iterable[str], budget: int) -> set[str]:
    """The untracked text files and links, the smallest first, whose diffs together have at most `budget` bytes."""
    sizes = {}
    for name in names:
        with contextlib.suppress(OSError):  # it was removed meanwhile
            sizes[name] = (root / name).lstat().st_size
    chosen = set()
    for name in sorted(sizes, key=sizes.__getitem__):
        path = root / name
        if sizes[name] > budget:
            break
        is_readable = path.is_symlink() or path.is_file()
        if not is_readable or any(fnmatch(path.name, pattern) for pattern in _SECRET_FILES):
            continue
        with contextlib.suppress(OSError, UnicodeDecodeError):  # it was removed meanwhile, or is not UTF-8
            text = (os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()).decode()
            size = len(text.encode()) + text.count("\n") + 16 * len(name) + _HEADER_BYTES
            if "\0" not in text and size <= budget:
                chosen.add(name)
                budget -= size
    return chosen


def _diff_of_new(root: Path, names: Iterable[str]) -> bytes | None:
    """A diff that creates untracked files. `git diff` shows those that an index has with --intent-to-add."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "names")
        listed.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in sorted(names)))
        add = ("add", "--intent-to-add", f"--pathspec-from-file={listed}", "--pathspec-file-nul")
        index = f"{folder}/index"
        return None if _git(root, *add, index=index) is None else _git(root, *_DIFF, index=index)


def _git(root: Path, *words: str, index: str | None = None) -> bytes | None:
    """The first MAX_DIFF_BYTES + 1 bytes that a git command prints; None when it fails or takes too long."""
    command = ["git", "-C", str(root), "--literal-pathspecs", "-c", "core.quotePath=true", *words]
    environment = os.environ | ({"GIT_INDEX_FILE": index} if index else {})
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
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
