"""Nodes that check each other: the head waits for all."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.preflight import cluster, collectives
from pretrainkit.preflight.node import NodeCheckRequest
from pretrainkit.preflight.report import NodeReport


def test_the_store_is_open_until_the_last_node_has_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import TCPStore

    def run_probes(*_: Any, node: int, address: str, port: int, **__: Any) -> tuple[list[dict[str, Any]], str]:
        time.sleep(node)
        TCPStore(address, port, is_master=False, timeout=timedelta(seconds=1))
        return [{"num_bytes": 2**20, "bytes_per_s": 2.0**30}], ""

    monkeypatch.setattr(collectives, "run_probes", run_probes)
    monkeypatch.setattr(cluster, "check_node", lambda request: NodeReport("host", ()))
    request = NodeCheckRequest(1, "cpu", tmp_path, timeout_s=20)
    places = [cluster.Place(node, 2, "test") for node in range(2)]
    with ThreadPoolExecutor(2) as nodes:
        found = list(nodes.map(lambda place: cluster.check_nodes(request, place)[1], places))
    assert [check and check.found for check in found] == ["2 ranks on 2 nodes over gloo, 1.0 MiB at 1.0 GiB/s"] * 2
    assert list(tmp_path.iterdir()) == []
