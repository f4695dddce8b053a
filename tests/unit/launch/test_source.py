"""source.txt holds what is needed to have a run again, and no secret."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pretrainkit.launch import source


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_clean_checkout_is_its_commit(repository: Path) -> None:
    lines = source._repository(repository)
    assert lines[0].startswith("commit ") and len(lines[0]) == len("commit ") + 40
    assert lines[1:] == ["untracked: nothing", "uncommitted changes: none"]


def test_changes_and_new_files_are_kept(repository: Path) -> None:
    (repository / "code.py").write_text("a = 2\n")
    (repository / "new.py").write_text("b = 3\n")
    (repository / "data.bin").write_bytes(b"\0")
    text = "\n".join(source._repository(repository))
    assert "untracked: data.bin new.py" in text and "-a = 1" in text and "+a = 2" in text
    assert "+++ b/new.py\n@@ -0,0 +1,1 @@\n+b = 3" in text and "b/data.bin" not in text


def test_a_long_diff_is_cut(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_DIFF_BYTES", 10)
    (repository / "code.py").write_text("a = 2\n")
    assert "[cut: the diff has" in source._repository(repository)[-1]


def test_an_installed_package_says_so(tmp_path: Path) -> None:
    assert source._repository(tmp_path) == ["source: an installed package, not a git checkout"]
