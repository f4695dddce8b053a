"""source.txt holds what is needed to have a run again, and no secret."""

from __future__ import annotations

import os
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from pretrainkit.run import source


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
    assert (
        "untracked: as follows\n  data.bin (listed only)\n  new.py\n" in text and "-a = 1" in text and "+a = 2" in text
    )
    assert "+++ b/new.py\n@@ -0,0 +1 @@\n+b = 3" in text and "b/data.bin" not in text


NEW_FILES = {
    "new dir/mod ule.py": b"a = 1\n",
    "日本.py": "s = '語'\n".encode(),
    'q"uo\\te\n.py': b"b = 2\n",
    os.fsdecode(b"latin\xe9.py"): b"c = 3\n",
    "kernel.cu": b"__global__ void f() {}\n",
    "Makefile": b"all:\n\ttrue\n",
    "config.json": b"{}",
    "odd.txt": "a\r\nb\x0cc\u2028d\n\n".encode(),
    "empty/__init__.py": b"",
}


@pytest.mark.parametrize("setting", ["", "diff.noprefix", "color.ui", "diff.mnemonicPrefix"])
def test_the_source_can_be_had_again(repository: Path, tmp_path_factory: pytest.TempPathFactory, setting: str) -> None:
    again = tmp_path_factory.mktemp("again")
    git(again, "clone", "-q", str(repository), ".")
    if setting:
        git(repository, "config", setting, "always" if setting == "color.ui" else "true")
    for name, content in NEW_FILES.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(content)
    (repository / "code.py").write_text("a = 2\n")
    (repository / "run.sh").write_text("true\n")
    (repository / "run.sh").chmod(0o755)
    (repository / "link").symlink_to("code.py")
    text = "\n".join(["written today", "command: a b", *source._repository(repository)]) + "\n"
    assert "listed only" not in text and "  new dir/mod ule.py\n" in text and "  日本.py\n" in text
    (again / ".git" / "source.txt").write_text(text, encoding="utf-8")
    git(again, "apply", ".git/source.txt")
    assert {name: (again / name).read_bytes() for name in NEW_FILES} == NEW_FILES
    assert (again / "code.py").read_text() == "a = 2\n" and os.access(again / "run.sh", os.X_OK)
    assert (again / "link").readlink() == Path("code.py")


def test_what_is_no_text_or_a_secret_is_listed_only(repository: Path) -> None:
    (repository / "late.bin").write_bytes(b"a" * 10_000 + b"\0")
    (repository / "latin.txt").write_bytes(b"\xe9")
    (repository / ".env").write_text("PASSWORD=secret\n")
    os.mkfifo(repository / "pipe")
    text = "\n".join(source._repository(repository))
    for name in ("late.bin", "latin.txt", ".env"):
        assert f"  {name} (listed only)\n" in text
    assert "secret" not in text and "uncommitted changes: none" in text


def test_many_and_huge_files_take_little_memory(repository: Path) -> None:
    for number in range(3000):
        (repository / f"output_{number}.txt").write_text("x" * 1000)
    (repository / "huge.txt").write_bytes(b"line of text\n" * 3_000_000)
    (repository / "small.py").write_text("kept = 1\n")
    lines, peak = traced(repository)
    assert "  huge.txt (listed only)" in lines and "+kept = 1" in lines[-1]
    assert len(lines[-1].encode()) <= source.MAX_DIFF_BYTES and peak < 8 * source.MAX_DIFF_BYTES


def test_a_huge_change_takes_little_memory(repository: Path) -> None:
    (repository / "code.py").write_bytes(b"line of text\n" * 3_000_000)
    lines, peak = traced(repository)
    assert "[cut: the diff has more than" in lines[-1] and peak < 8 * source.MAX_DIFF_BYTES
    assert not (repository / ".git" / "index.lock").exists()


def traced(repository: Path) -> tuple[list[str], int]:
    """What is told of a checkout, and the peak of memory meanwhile in bytes."""
    tracemalloc.start()
    try:
        return source._repository(repository), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_more_files_than_are_looked_at_are_told(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_UNTRACKED", 2)
    for name in "abc":
        (repository / name).touch()
    assert source._repository(repository)[1:5] == ["untracked: as follows", "  a", "  b", "  and more"]


def test_a_long_diff_is_cut(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_DIFF_BYTES", 100)
    (repository / "code.py").write_text("a = 2\n" * 100)
    (repository / "new.py").write_text("b = 3\n")
    lines = source._repository(repository)
    assert lines[-1].endswith("[cut: the diff has more than 100 bytes]") and len(lines[-1]) < 200
    assert "  new.py (listed only)" in lines


def test_what_git_can_not_tell_is_not_said_to_be_nothing(repository: Path) -> None:
    (repository / ".git" / "index").write_bytes(b"damaged")
    lines = source._repository(repository)
    assert lines[1:] == [
        "untracked: git can't list them here",
        "uncommitted changes: git can't read those of tracked files here",
    ]


def test_an_installed_package_says_so(tmp_path: Path) -> None:
    assert source._repository(tmp_path) == ["source: an installed package, not a git checkout"]
