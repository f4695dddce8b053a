"""A machine where Triton can't compile is found before a run loads its model."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest
from namespaces import in_namespace

from pretrainkit.errors import RequestError
from pretrainkit.megatron.compiler import check_triton


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without any compiler or cache; gives the folder of PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return programs


def compiler(path: Path) -> str:
    path.touch(mode=0o755)
    return str(path)


@pytest.mark.usefixtures("machine")
def test_a_machine_without_a_compiler_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no C compiler \(gcc or clang\)"):
        check_triton()


def test_a_compiler_is_what_triton_takes(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(machine / "cc")
    with pytest.raises(RequestError):
        check_triton()
    monkeypatch.setenv("CC", compiler(machine / "another"))
    check_triton()
    monkeypatch.setenv("CC", "nvc")
    compiler(machine / "gcc")
    with pytest.raises(RequestError, match=r"no C compiler \(nvc\)"):
        check_triton()
    monkeypatch.delenv("CC")
    check_triton()


def test_a_python_without_headers_is_refused(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(machine / "gcc")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    with pytest.raises(RequestError, match=r"no .*include/Python\.h"):
        check_triton()


@pytest.mark.usefixtures("machine")
def test_a_filled_cache_needs_no_compiler(tmp_path: Path) -> None:
    from triton.runtime.cache import get_cache_manager

    get_cache_manager("ab" * 32).put(b"", f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}")
    assert (tmp_path / "cache").is_dir()
    check_triton()


def test_a_cache_in_a_home_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    code = "from pretrainkit.megatron.compiler import check_triton; check_triton()"
    environment = {"HOME": str(tmp_path), "PATH": os.defpath}
    done = in_namespace(f"mount -t tmpfs -o ro none {tmp_path}", [sys.executable, "-c", code], env=environment)
    assert f"RequestError: Triton's cache: {tmp_path}/.triton/cache can't be written" in done.stderr
