"""Kernels and recomputation are decided once, in the Python environment that runs the ranks."""

from __future__ import annotations

import dataclasses
import json
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.config.run_file import read_run, write_run
from pretrainkit.config.schema import Kernels, ResolvedRun
from pretrainkit.errors import RequestError
from pretrainkit.launch.start import summarize_estimates
from pretrainkit.run import resource_plan
from pretrainkit.run.resource_plan import choose_on_node, plan_memory

PLAIN = Kernels(*8 * ["torch"])
OURS = Kernels("torch", "triton", "triton", "liger", "triton", "gemm", "torch", "graphs")


@pytest.fixture
def gpu_run(make_run: Callable[..., ResolvedRun]) -> Callable[..., ResolvedRun]:
    def make(launch: dict[str, Any] | None = None, **training: Any) -> ResolvedRun:
        run = make_run()
        config = dataclasses.replace(
            run.config,
            launch=dataclasses.replace(run.config.launch, **launch or {}),
            training=dataclasses.replace(run.config.training, **training),
        )
        return dataclasses.replace(run, config=config, accelerator="gpu", precision="bf16")

    return make


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Libraries that this environment has."""
    libraries: set[str] = set()
    monkeypatch.setattr(resource_plan, "installed_libraries", lambda: frozenset(libraries))
    monkeypatch.setattr(resource_plan, "describe_gpu", lambda: ("NVIDIA H200", 139.8))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("CC", sys.executable)  # this machine may have no compiler
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    return libraries


def test_a_local_start_decides(gpu_run: Callable[..., ResolvedRun], installed: set[str]) -> None:
    assert plan_memory(gpu_run()).kernels == dataclasses.replace(PLAIN, weight_gradient="gemm", cuda_graphs="graphs")
    installed |= {"triton", "liger_kernel"}
    run = plan_memory(gpu_run())
    assert run.kernels == OURS
    assert OURS.describe("gpu") in summarize_estimates(run)


@pytest.mark.parametrize(
    "launch",
    [{"executor": "slurm"}, {"executor": "pbs"}, {"container_image": "/x.sif"}],
    ids=["slurm", "pbs", "local container"],
)
def test_a_start_elsewhere_leaves_it_to_the_node(gpu_run: Callable[..., ResolvedRun], launch: dict[str, str]) -> None:
    run = plan_memory(gpu_run(launch))
    assert run.kernels is None
    assert run.estimates
    assert "decided on the compute node" in summarize_estimates(run)


@pytest.mark.parametrize("launch", [{"executor": "slurm"}, {"executor": "pbs", "python": "/env/bin/python"}], ids=str)
def test_kernels_asked_for_by_name_are_not_refused_by_what_a_login_node_lacks(
    gpu_run: Callable[..., ResolvedRun], launch: dict[str, str]
) -> None:
    plan_memory(gpu_run(launch, fused_kernels="swiglu"))
    plan_memory(gpu_run(launch, layer_spec="te"))
    with pytest.raises(RequestError, match="fused swiglu can't be used"):
        plan_memory(gpu_run({"executor": "pbs"}, fused_kernels="swiglu"))  # the job runs this environment


def test_a_node_decides_by_its_packages_and_gpu(
    gpu_run: Callable[..., ResolvedRun], installed: set[str], tmp_path: Path
) -> None:
    installed |= {"triton", "liger_kernel"}
    (log_dir := tmp_path / "attempt_1").mkdir()
    write_run(tmp_path / "run.json", plan_memory(gpu_run({"executor": "slurm"})))
    assert choose_on_node(tmp_path / "run.json", log_dir) == log_dir / "run.json"
    run = read_run(log_dir / "run.json")
    assert run == read_run(tmp_path / "run.json")
    assert (run.kernels, run.gpu_name, run.gpu_memory_gib) == (OURS, "NVIDIA H200", 139.8)
    assert run.estimates and run.estimates.gpu_memory_gib == 139.8

    installed -= {"liger_kernel"}  # a later job may find another environment
    choose_on_node(tmp_path / "run.json", log_dir)
    assert read_run(log_dir / "run.json").kernels == dataclasses.replace(OURS, swiglu="torch")


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "A100 80GB", "V100"])
def test_a_card_without_fp8_is_refused(gpu_run: Callable[..., ResolvedRun], name: str) -> None:
    run = gpu_run({"executor": "slurm", "gpu_memory_gib": 80.0}, precision="fp8")
    with pytest.raises(RequestError, match=rf"{name} has no FP8 products(.|\n)*--precision bf16"):
        plan_memory(dataclasses.replace(run, gpu_name=name))
    plan_memory(dataclasses.replace(run, gpu_name="NVIDIA H200"))


def test_a_node_refuses_what_it_can_not_have(gpu_run: Callable[..., ResolvedRun], tmp_path: Path) -> None:
    write_run(tmp_path / "run.json", plan_memory(gpu_run({"executor": "slurm"}, fused_kernels="swiglu")))
    before = json.loads((tmp_path / "run.json").read_text())
    with pytest.raises(RequestError, match="fused swiglu can't be used"):
        choose_on_node(tmp_path / "run.json", tmp_path)
    assert json.loads((tmp_path / "run.json").read_text()) == before


def test_on_cpu_nothing_is_fused(make_run: Callable[..., ResolvedRun], installed: set[str]) -> None:
    installed |= {"triton", "liger_kernel", "transformer_engine"}
    assert plan_memory(dataclasses.replace(make_run(), accelerator="cpu")).kernels == PLAIN


def test_a_machine_that_trains_needs_a_compiler(
    gpu_run: Callable[..., ResolvedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    write_run(tmp_path / "run.json", plan_memory(gpu_run({"executor": "slurm"})))
    plan_memory(gpu_run(), refuse=False)
    for start in (lambda: plan_memory(gpu_run()), lambda: choose_on_node(tmp_path / "run.json", tmp_path)):
        with pytest.raises(RequestError, match="no-such-compiler"):
            start()
