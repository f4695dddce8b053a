"""Nodes of a job find each other, and one outcome stands for all."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from namespaces import in_namespace

from pretrainkit.errors import PretrainkitError
from pretrainkit.jobs import rendezvous
from pretrainkit.jobs.rendezvous import FAILED, STOP, HeadInfo, Rendezvous, combine_outcomes, own_address
from pretrainkit.run.outcome import SUCCESS, Outcome


def report(exit_code: int, *, is_consequence: bool = False, reason: str = "r") -> dict[str, Any]:
    return {
        "exit_code": exit_code,
        "failed_rank": None,
        "reason": reason,
        "host": "h",
        "is_consequence": is_consequence,
    }


REPORTS = {
    "all done": ({0: report(0), 1: report(0)}, 0, ""),
    "all saved": ({0: report(85), 1: report(85)}, 85, "r"),
    "one saw the end later": ({0: report(0), 1: report(85)}, 85, "r"),
    "the cause comes before its consequence": (
        {0: report(1, is_consequence=True), 1: report(7, reason="cause")},
        7,
        "node 1 (h): cause",
    ),
    "a node died": ({0: report(1, is_consequence=True), 1: None}, 1, "node 1 ended without a report"),
    "a node died after the others had saved": ({0: report(85), 1: None}, 1, "without a report"),
}


@pytest.mark.parametrize(("reports", "exit_code", "reason"), REPORTS.values(), ids=list(REPORTS))
def test_the_first_cause_is_the_outcome(reports: dict, exit_code: int, reason: str) -> None:  # type: ignore[type-arg]
    outcome = combine_outcomes(reports)
    assert outcome.exit_code == exit_code and reason in outcome.reason


def test_nodes_meet_and_end_together(tmp_path: Path) -> None:
    nodes = [Rendezvous(tmp_path, number, 3) for number in range(3)]
    ends: dict[int, Outcome] = {}

    def other(node: Rendezvous) -> None:
        assert node.wait_for_head().port == 17
        node.report_ready()
        assert node.wait_for_go()
        ends[node.node] = node.agree_on_outcome(SUCCESS, is_consequence=False)

    threads = [threading.Thread(target=other, args=(node,)) for node in nodes[1:]]
    for thread in threads:
        thread.start()
    head = nodes[0]
    head.publish(HeadInfo("127.0.0.1", 17, "/logs"))
    head.report_ready()
    head.wait_until_all_ready()
    assert len(head.hosts) == 3
    head.mark(STOP)
    assert all(node.has(STOP) for node in nodes)
    assert head.agree_on_outcome(Outcome(85, 0, "saved"), is_consequence=False).exit_code == 85
    for thread in threads:
        thread.join()
    assert {outcome.exit_code for outcome in ends.values()} == {85}


def test_a_bad_node_is_named(tmp_path: Path) -> None:
    head, other = (Rendezvous(tmp_path, number, 2) for number in range(2))
    head.report_ready()
    other.report_ready("gpus: 7 of 8")
    with pytest.raises(PretrainkitError, match=r"node 1 \(.*\): gpus: 7 of 8"):
        head.wait_until_all_ready()
    head.mark(FAILED)
    assert not other.wait_for_go() and other.should_abort


def test_a_node_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_S", 0.1)
    head = Rendezvous(tmp_path, 0, 3)
    head.report_ready()
    with pytest.raises(PretrainkitError, match="node 1, 2 of 3"):
        head.wait_until_all_ready()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_node_that_is_gone_is_noticed(gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "DEAD_AFTER_S", 0.5)
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 0)
    nodes = [Rendezvous(tmp_path, number, 2) for number in range(2)]
    for node in nodes:
        node.heartbeat()
    assert not any(node.should_abort for node in nodes)
    end_s = time.monotonic() + 30
    while not nodes[1 - gone].should_abort:
        nodes[1 - gone].heartbeat()
        assert not nodes[gone].should_abort and time.monotonic() < end_s
        time.sleep(0.05)


def test_a_full_disk_stops_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "DEAD_AFTER_S", 0.5)
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 0)
    nodes = [Rendezvous(tmp_path, number, 2) for number in range(2)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for _ in range(20):
            for node in nodes:
                node.heartbeat()
            time.sleep(0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(node.should_abort for node in nodes)


@pytest.mark.parametrize("node", [0, 1])
def test_a_sign_of_life_that_is_just_being_written_is_one(node: int, tmp_path: Path) -> None:
    watcher = Rendezvous(tmp_path, 1 - node, 2)
    (tmp_path / f"alive_{node}").touch()
    assert not watcher.should_abort


def test_a_node_that_sees_a_failure_with_the_start_takes_part_in_the_outcome(tmp_path: Path) -> None:
    head, other = (Rendezvous(tmp_path, number, 2) for number in range(2))
    for node in (head, other):
        node.report_ready()
    head.wait_until_all_ready()
    head.mark(FAILED)
    assert other.wait_for_go() and other.should_abort


def test_the_address_is_one_of_this_machine() -> None:
    assert own_address(["no-such-host.invalid"]).count(".") == 3


def test_no_store_is_opened_where_processes_cannot_connect_to_each_other() -> None:
    code = "from pretrainkit.jobs.rendezvous import open_store; open_store()"
    done = in_namespace("", [sys.executable, "-c", code], timeout=60)
    assert "RequestError: 127.0.0.1: can't connect to a port of this machine" in done.stderr
