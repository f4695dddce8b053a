"""What nvidia-smi and the kernel say about links, in their own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrainkit.preflight import collectives, links
from pretrainkit.preflight.links import Link

NVLINK = """\t\x1b[4mGPU0\tGPU1\tGPU2\tmlx5_0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15
GPU1\tNV18\t X \tSYS\tNODE\t0-15
GPU2\tSYS\tSYS\t X \tNODE\t16-31
mlx5_0\tPIX\tNODE\tNODE\t X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""
STATUS = "GPU 0: NVIDIA H100 (UUID: GPU-aaaa)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n\t Link 2: <inactive>\n"


def test_nvlink_counts_when_it_connects_all() -> None:
    assert links.has_nvlink(NVLINK, ["0", "1"])
    assert not links.has_nvlink(NVLINK, ["0", "1", "2"])
    assert not links.has_nvlink("", ["0", "1"])


def test_rates_are_sums_of_active_lanes() -> None:
    assert links.nvlink_rate(STATUS) == pytest.approx(53.124e9)
    assert links.pcie_rate("5, 16\n") == pytest.approx(63e9, rel=0.01)
    assert links.pcie_rate("[N/A], [N/A]") == links.pcie_rate("") == 0


def test_the_slowest_gpu_gives_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/bash\ncase $* in topo*) cat <<'E'\n{NVLINK}\nE\n;; *nvlink*'-i 1') cat <<'E'\n{STATUS}\nE\n;;\n"
        f"*nvlink*) echo ' Link 0: 50 GB/s';; *'-i 2') echo '4, 8';; *) echo '5, 16';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert links.link_between(["0", "1"]) == Link("NVLink", 50e9)
    pcie = links.link_between(["0", "2"])
    assert pcie and pcie.kind == "PCIe" and pcie.bytes_per_s == pytest.approx(15.75e9, rel=0.01)
    assert links.link_between(["0"]) is None


@pytest.mark.parametrize(
    ("speed", "transport", "link", "status", "words"),
    [
        (300e9, "P2P/CUMEM", Link("NVLink", 478e9), "ok", "NVLink gives 445.2 GiB/s"),
        (60e9, "P2P/CUMEM", Link("NVLink", 478e9), "warning", "slow"),
        (20e9, "SHM", Link("NVLink", 478e9), "warning", "NCCL doesn't use it"),
        (9e9, "SHM", Link("PCIe", 63e9), "ok", "PCIe gives"),
        (3e9, "SHM", Link("PCIe", 63e9), "warning", "slow"),
        (3e9, "SHM", None, "ok", "SHM"),
    ],
    ids=["NVLink", "slow NVLink", "unused NVLink", "PCIe", "slow PCIe", "unknown"],
)
def test_an_all_reduce_is_measured_by_the_link(
    speed: float, transport: str, link: Link | None, status: str, words: str
) -> None:
    results = [{"bytes_per_s": speed, "num_bytes": 2**26, "nccl": "2.27.7"}] * 2
    check = collectives._all_reduce(results, "gpu", transport, link)
    assert (check.status, words in check.found) == (status, True), check


def test_infiniband_that_is_not_used_is_told(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(state)
    assert links.active_infiniband(tmp_path) == ["mlx5_0"] and links.active_infiniband(tmp_path / "none") == []
    check = collectives._network("16 ranks on 2 nodes over NET/Socket, network Socket", ["mlx5_0"])
    assert check.status == "warning" and "InfiniBand: mlx5_0" in check.found
    assert collectives._network("16 ranks on 2 nodes over NET/IB, network IB", ["mlx5_0"]).status == "ok"
    assert collectives._network("16 ranks on 2 nodes over NET/Socket, network Socket", []).status == "ok"
