"""What is reported of GPUs, all-reduces and the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrainkit.preflight import collectives


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (["ok", "ok", ""], "no answer from node 2 (c)"),
        (["timeout", "", "refused"], "no answer from node 1 (b)"),
        (["ok", "RuntimeError: refused", "ok"], "the all-reduce failed: node 1 (b): RuntimeError: refused"),
    ],
    ids=["silent", "silent and failed", "failed"],
)
def test_a_failure_of_the_network_names_nodes(answers: list[str], words: str) -> None:
    assert collectives._network_failure(answers, ["a", "b", "c"]) == words
    assert collectives._network_failure(["ok"] * 3, ["a", "b", "c"]) == ""


def test_a_slow_and_a_wrong_gpu_are_named() -> None:
    slow = collectives._compute([{"tflops": 600.0}, {"tflops": 610.0}, {"tflops": 300.0}])
    assert slow.status == "warning" and "GPU 2 (300)" in slow.found
    wrong = collectives._compute([{"tflops": 600.0}, {"error": "ValueError: a matrix product has a wrong result"}])
    assert wrong.is_failed and "GPU 1: ValueError" in wrong.found


def test_the_transport_is_read_from_nccls_log() -> None:
    text = (
        "host:1:1 [0] NCCL INFO Using network IB\n"
        "host:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
        "host:1:1 [0] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM\n"
        "host:1:1 [0] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA\n"
    )
    assert collectives._nccl_transport(text) == "NET/IB, P2P/CUMEM, network IB"


@pytest.mark.parametrize(
    ("transport", "has_nvlink", "status"),
    [("P2P/CUMEM", True, "ok"), ("SHM", True, "warning"), ("SHM", False, "ok"), ("", True, "ok")],
    ids=["NVLink", "unused NVLink", "PCIe", "unknown"],
)
def test_nvlink_that_nccl_leaves_unused_is_a_warning(transport: str, has_nvlink: bool, status: str) -> None:
    results = [{"bytes_per_s": 300e9, "num_bytes": 2**26, "nccl": "2.27.7"}] * 2
    check = collectives._all_reduce(results, "gpu", transport, has_nvlink)
    assert (
        check.status == status and check.found.startswith("2 ranks over NCCL 2.27.7") and "64.0 MiB at" in check.found
    )


def test_infiniband_that_is_not_used_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over_sockets = "16 ranks on 2 nodes over NET/Socket, network Socket"
    monkeypatch.setattr(collectives, "INFINIBAND", tmp_path)
    assert collectives._network(over_sockets) == ("ok", over_sockets)
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(state)
    status, found, *_ = collectives._network(over_sockets)
    assert status == "warning" and found.endswith("InfiniBand: mlx5_0")
    assert collectives._network("16 ranks on 2 nodes over NET/IB, network IB")[0] == "ok"
