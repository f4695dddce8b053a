"""What a look at an image finds: packages in the way, caches, broken imports."""

from __future__ import annotations

import json
import site
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.machine import installed_version
from pretrainkit.preflight import software
from pretrainkit.preflight.node import NodeCheckRequest, check_node
from pretrainkit.preflight.probe import Probe
from pretrainkit.preflight.report import FAILED, OK, WARNING


def test_a_replaced_package_of_the_image_is_named(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text(f"numpy=={installed_version('numpy')}\n")
    assert software.check_kept(kept).status == OK
    kept.write_text("numpy==1.0\nno-such-thing==2.0+nv25.11\n")
    check = software.check_kept(kept)
    assert (
        check.status == FAILED and "numpy 1.0 -> " in check.found and "no-such-thing 2.0+nv25.11 -> none" in check.found
    )


@pytest.mark.parametrize(
    ("enabled", "package", "status"),
    [(True, "torch", FAILED), (True, "harmless", OK), (False, "torch", OK)],
    ids=["in the way", "another", "left out"],
)
def test_packages_of_the_home_must_stay_out(
    enabled: bool, package: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}-1.0.dist-info").mkdir()
    monkeypatch.setattr(site, "ENABLE_USER_SITE", enabled)
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path))
    check = software.check_isolation({})
    assert check.status == status, check
    if status == FAILED:
        assert f"{tmp_path} shadows: torch" in check.found and "PYTHONNOUSERSITE" in check.action


def test_packages_of_pythonpath_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    (tmp_path / "Megatron_Core-0.9.dist-info").mkdir()
    check = software.check_isolation({"PYTHONPATH": f"/none:{tmp_path}"})
    assert check.status == WARNING and "megatron-core" in check.found


def test_caches_are_looked_for_where_they_will_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, group = tmp_path / "home", tmp_path / "group"
    home.mkdir()
    (tmp_path / "file").touch()
    everywhere = {name: f"{group}/{name}" for name in software.HOME_CACHES}
    assert software.check_caches({"HOME": str(home), **everywhere}).status == OK
    assert not group.exists(), "a look makes no folders"
    closed = software.check_caches({"HOME": str(home), **everywhere, "HF_HOME": f"{tmp_path}/file/hub"})
    assert closed.status == FAILED and f"HF_HOME ({tmp_path}/file/hub)" in closed.found
    monkeypatch.setattr(software, "MIN_HOME_BYTES", 2**60)
    small = software.check_caches({"HOME": str(home), "XDG_CACHE_HOME": str(group)})
    assert small.status == WARNING and small.found.endswith(": TRITON_CACHE_DIR") and "cache_dir" in small.action


@pytest.mark.parametrize(
    ("found", "accelerator", "status", "words"),
    [
        ({"imports": {"torch": 2.0, "nemo": 8.0}}, "gpu", OK, "in 10 s; not installed: triton"),
        ({"imports": {"torch": 1.0, "nemo": "ImportError: x"}}, "cpu", FAILED, "nemo: ImportError: x"),
        ({"imports": {"torch": 1.0, "te": None}, "error": "killed by SIGSEGV"}, "gpu", FAILED, "te: killed by SIG"),
        ({"imports": {"torch": 1.0, "te": "OSError: libcuda.so.1: no"}}, "cpu", WARNING, "driver: te"),
        ({"imports": {"torch": 1.0, "te": "OSError: libcuda.so.1: no"}}, "gpu", FAILED, "libcuda"),
        ({"error": "no answer within 120 s"}, "cpu", FAILED, "no answer"),
    ],
    ids=["good", "broken", "crash", "no driver at build", "no driver", "nothing"],
)
def test_imports(
    found: dict[str, Any], accelerator: str, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "run_probes", lambda *_: ([found], ""))
    check = software.check_imports(accelerator, timeout_s=1)
    assert (check.status, words in check.found) == (status, True), check


def test_what_is_tried_is_written_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks.py").write_text("raise OSError('libx.so: no such file\\nmore')")
    (tmp_path / "exits.py").write_text("import sys; print(open(sys.path[0] + '/rank_0.json').read()); sys.exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(software, "REQUIRED", ("json", "exits"))
    monkeypatch.setattr(software, "OPTIONAL", ("breaks", "absent_thing"))
    probe = Probe("cpu", 0, 1, str(tmp_path), 1.0)
    software.import_all(probe)
    found = json.loads(probe.result_file.read_text())["imports"]
    assert isinstance(found.pop("json"), float)
    assert found == {"exits": "SystemExit: 3", "breaks": "OSError: libx.so: no such file"}


def test_software_is_part_of_the_report_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "run_probes", lambda *_: ([{"imports": {"torch": 1.0}}], ""))
    (tmp_path / "kept.txt").touch()
    request = NodeCheckRequest(
        1, "cpu", tmp_path, collectives=False, constraints=None, software=True, kept=tmp_path / "kept.txt"
    )
    names = [check.name for check in check_node(request).checks]
    assert {"image's own", "isolation", "caches", "imports"} <= set(names) and "kernels" not in names
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
