"""Which nodes are to blame when some pairs of them don't reach each other, and what is said about trials."""

from __future__ import annotations

from typing import Any

import pytest

from pretrainkit.preflight import collectives
from pretrainkit.preflight.collectives_rank import judge, pair_of


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 7])
def test_every_node_is_in_a_pair_with_each_neighbour(num_nodes: int) -> None:
    pairs = {pair_of(kind, node, num_nodes) for kind in ("even", "odd") for node in range(num_nodes)} - {None}
    ring = {(num_nodes - 1, 0)} if num_nodes == 4 else set()
    assert pairs == {(node, node + 1) for node in range(num_nodes - 1)} | ring


@pytest.mark.parametrize(
    ("num_nodes", "failed", "bad_nodes"),
    [
        (4, [(1, 2), (2, 3)], [2]),
        (5, [(1, 2), (2, 3)], [2]),
        (3, [(0, 1)], [0]),
        (3, [], []),
        (2, [(0, 1)], []),
    ],
    ids=["one of a ring", "one", "the first", "none", "two of two"],
)
def test_who_reaches_nobody_is_bad(num_nodes: int, failed: list[tuple[int, int]], bad_nodes: list[int]) -> None:
    worked = {(node, node + 1): (node, node + 1) not in failed for node in range(num_nodes - 1)}
    if num_nodes == 4:
        worked[3, 0] = True
    assert judge(num_nodes, worked) == {"bad_nodes": bad_nodes, "bad_pairs": [list(pair) for pair in failed]}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"bad_nodes": [2], "bad_pairs": [[1, 2]]}, "node 2 (c)"),
        ({"bad_nodes": [], "bad_pairs": [[0, 1]]}, "don't reach each other: 0 (a) and 1 (b)"),
        ({"bad_nodes": [], "bad_pairs": []}, "though pairs of nodes work"),
        ({"error": "timeout"}, "no answer from node 0 (a): timeout"),
    ],
    ids=["node", "pair", "all", "head"],
)
def test_a_failure_of_the_network_names_nodes(result: dict[str, Any], words: str) -> None:
    assert words in collectives._network_failure(result, ["a", "b", "c"]).found


def test_a_slow_and_a_wrong_gpu_are_named() -> None:
    slow = collectives._compute([{"tflops": 600.0}, {"tflops": 610.0}, {"tflops": 300.0}])
    assert slow.status == "warning" and "GPU 2 (300)" in slow.found
    wrong = collectives._compute([{"tflops": 600.0}, {"error": "ValueError: a matrix product has a wrong result"}])
    assert wrong.is_failed and "GPU 1: ValueError" in wrong.found


def test_the_transport_is_read_from_nccls_log(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "nccl.host.1").write_text(
        "host:1:1 [0] NCCL INFO Using network IB\n"
        "host:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
        "host:1:1 [0] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM\n"
        "host:1:1 [0] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA\n"
    )
    assert collectives._nccl_transport(tmp_path) == "NET/IB, P2P/CUMEM, network IB"
