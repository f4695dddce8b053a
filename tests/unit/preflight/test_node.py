"""What a node says about itself: each fault that can be made here is found and named."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
from namespaces import in_namespace

from pretrainkit import machine
from pretrainkit.machine import Gpu
from pretrainkit.preflight import node, software
from pretrainkit.preflight.node import NodeCheckRequest, check_node
from pretrainkit.preflight.report import FAILED, OK, SKIPPED, WARNING, NodeReport
from pretrainkit.records import decode


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A driver with two GPUs, which this machine needn't have."""

    def make(*, used_mib: int = 4, errors: int = 0, visible: int = 2) -> None:
        gpus = [
            Gpu(0, "GPU-aaaa", "NVIDIA H100 80GB HBM3", "550.54.15", 81559, 4, 0, has_nvlink=True),
            Gpu(1, "GPU-bbbb", "NVIDIA H100 80GB HBM3", "550.54.15", 81559, used_mib, errors, has_nvlink=True),
        ]
        monkeypatch.setattr(node, "read_gpus", lambda: machine._visible(gpus))
        monkeypatch.setattr(node, "count_gpus", lambda: visible)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


@pytest.mark.parametrize(
    ("gpus", "ranks", "status", "words"),
    [
        ({}, 2, OK, "2 x NVIDIA H100 80GB HBM3, driver 550.54.15"),
        ({}, 4, FAILED, "4 ranks need one each"),
        ({"visible": 1}, 2, FAILED, "CUDA finds 1 of 2 GPUs"),
        ({"errors": 3}, 2, FAILED, "GPU 1 has 3 uncorrected memory errors"),
        ({"used_mib": 40000}, 2, FAILED, "in use by others: GPU 1 (40000 of 81559 MiB)"),
        ({"used_mib": 40000}, 1, OK, "driver"),
    ],
    ids=["good", "too few", "CUDA sees fewer", "memory errors", "in use", "in use, but not needed"],
)
def test_gpus(two_gpus, gpus, ranks, status, words) -> None:  # type: ignore[no-untyped-def]
    two_gpus(**gpus)
    check = node.check_gpus(ranks)
    assert (check.status, words in check.found) == (status, True), check


@pytest.mark.parametrize("visible", ["1", "GPU-bbbb", "0"])
def test_only_visible_gpus_count(two_gpus, visible: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    two_gpus(errors=3, visible=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert node.check_gpus(1).status == (OK if visible == "0" else FAILED)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has GPUs")
def test_a_machine_without_driver_has_no_gpus() -> None:
    assert machine.read_gpus() == []


class Nvml:
    """NVML's Python bindings for one GPU that has neither ECC nor NVLink, as a consumer's."""

    class NVMLError(Exception):
        pass

    VALUES: ClassVar[dict[str, object]] = {
        "nvmlDeviceGetHandleByIndex": object(),
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=24 * 2**30, used=2**30),
        "nvmlDeviceGetUUID": "GPU-cccc",
        "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
        "nvmlSystemGetDriverVersion": "570.1",
    }

    def __getattr__(self, name: str) -> object:
        def call(*_: object) -> object:
            if name not in self.VALUES:
                raise self.NVMLError("Not Supported")
            return self.VALUES[name]

        return 1 if name.startswith("NVML_") else call


def test_what_a_gpu_does_not_have_is_no_error() -> None:
    expected = Gpu(0, "GPU-cccc", "NVIDIA GeForce RTX 4090", "570.1", 24 * 1024, 1024, 0, has_nvlink=False)
    assert machine._read(Nvml(), 0) == expected


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    check = node.check_disk(tmp_path, 1, 2**20)
    assert check.status in (OK, WARNING) and "free, writes" in check.found
    check = node.check_disk(tmp_path / "new" / "folder", 1, 2**20)
    assert check.status == WARNING and check.found.startswith(f"no folder {tmp_path}/new/folder yet; in {tmp_path}: ")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_fails(tmp_path: Path) -> None:
    check = node.check_disk(tmp_path, 2**60, 2**20)
    assert check.status == FAILED and "needed" in check.found and str(tmp_path) in check.found


def test_a_disk_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = node.check_disk(tmp_path / "file" / "folder", 0, 2**20)
    assert check.status == FAILED and os.strerror(errno.ENOTDIR) in check.found


def test_the_clock_is_compared_with_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node.check_clock(tmp_path).status == OK
    real = node.time.time
    monkeypatch.setattr(node.time, "time", lambda: real() + 60)
    check = node.check_clock(tmp_path)
    assert check.status == WARNING and check.found.startswith("60.0") and "ahead" in check.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "limit", "status", "found"),
    [
        (resource.RLIMIT_NOFILE, 256, WARNING, "256 open files"),
        (resource.RLIMIT_NOFILE, 128, FAILED, "128 open files"),
        (resource.RLIMIT_FSIZE, 2**29, FAILED, "of at most 512.0 MiB"),
    ],
)
def test_low_limits_are_a_warning_or_fail(number: int, limit: int, status: str, found: str) -> None:
    soft, hard = resource.getrlimit(number)
    resource.setrlimit(number, (limit, hard))
    try:
        check = node.check_limits()
    finally:
        resource.setrlimit(number, (soft, hard))
    assert check.status == status and found in check.found


def test_a_node_without_shared_memory_is_bad() -> None:
    code = "from pretrainkit.preflight import node; print(node.check_limits().status)"
    done = in_namespace("mount -t tmpfs -o ro none /dev/shm", [sys.executable, "-c", code], check=True)
    assert done.stdout == f"{FAILED}\n"


def test_packages_are_compared_with_the_tested_versions(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text('numpy==1.0.0 ; python_version < "3.11"\nnumpy==1.0.1\nunknown-thing==1\n')
    check = software.check_packages(constraints)
    assert check.status == WARNING and "(tested: 1.0.0, 1.0.1)" in check.found and "numpy" in check.found
    assert software.check_packages(tmp_path / "none.txt").status == SKIPPED
    assert software.check_packages(software.CONSTRAINTS).status in (OK, WARNING)


@pytest.mark.parametrize(("is_engine", "status"), [(True, FAILED), (False, WARNING)], ids=["engine", "other"])
def test_a_missing_package_is_named(is_engine: bool, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.importlib.metadata, "requires", lambda name: ["numpy", "no_such.thing>=2"])
    monkeypatch.setattr(software, "ENGINE", {"no-such-thing"} if is_engine else {"numpy"})
    check = software.check_packages(None)
    assert check.status == status and "no-such-thing" in check.found and "numpy" not in check.found


@pytest.mark.parametrize(
    ("left_s", "status"), [(3600.0, OK), (100.0, FAILED), (-5.0, FAILED), (None, SKIPPED)], ids=str
)
def test_time_left(left_s: float | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "time_left", lambda environment, timeout_s: left_s)
    assert node.check_time(300, 20).status == status


def test_a_report_names_its_problems_and_survives_json(tmp_path: Path) -> None:
    request = NodeCheckRequest(2, "cpu", tmp_path, needed_bytes=2**60, constraints=None, collectives=False)
    report = check_node(request)
    assert not report.is_good and report.problems[0].startswith("disk: ")
    assert decode(NodeReport, json.loads(json.dumps(report.to_json())), known_only=False) == report
    assert "BAD" in report.describe() and "what to do" in report.describe()


def test_a_check_that_breaks_is_a_failure_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("surprise")

    monkeypatch.setattr(node.shutil, "disk_usage", broken)
    report = check_node(NodeCheckRequest(1, "cpu", tmp_path, collectives=False))
    assert any("surprise" in problem for problem in report.problems)
