"""source.txt: what code, packages, data and command an attempt ran with, so that it can be had again."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from pretrainkit import files
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.launch.machine import installed_version
from pretrainkit.logs import masked

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
"""A longer diff is cut: it holds generated files, not source."""
SOURCE_SUFFIXES = (".py", ".sh", ".yaml", ".toml", ".txt", ".j2")
"""Untracked files that are kept whole."""
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
    """Commit, uncommitted diff and untracked files of the checkout that holds this package; of source the text too."""
    if not (root / ".git").exists():
        return ["source: an installed package, not a git checkout"]
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return ["source: a git checkout that git can't read here"]
    untracked = (_git(root, "ls-files", "--others", "--exclude-standard") or "").split()
    diff = (_git(root, "diff", "HEAD") or "") + "".join(_as_added(root, name) for name in untracked)
    if len(diff) > MAX_DIFF_BYTES:
        diff = diff[:MAX_DIFF_BYTES] + f"\n[cut: the diff has {len(diff)} characters]"
    return [
        f"commit {commit.strip()}",
        f"untracked: {' '.join(untracked) or 'nothing'}",
        f"uncommitted changes: {'as follows' if diff else 'none'}",
        *([diff] if diff else []),
    ]


def _as_added(root: Path, name: str) -> str:
    """An untracked source file as a part of a diff; empty for other files."""
    path = root / name
    if path.suffix not in SOURCE_SUFFIXES or not path.is_file() or path.stat().st_size > MAX_DIFF_BYTES:
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    added = "".join(f"+{line}\n" for line in lines)
    return f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n{added}"


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace")
