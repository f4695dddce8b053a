"""How the nodes of one start of a job find each other and agree on its end: small files on the shared disk.

The head (node 0) opens a store on a port that the system chooses, so that no two jobs on a machine meet, and tells
the others. Whoever has to stop, or failed, tells all. Every folder belongs to one start of one job.

    head.json       address and port of the head, and the folder of the attempt's logs; or why nothing starts
    ready_K.json    node K may start its ranks, or why not
    go              all nodes are ready
    stop            the ranks are to save and end (the job script makes it when the scheduler sends a signal)
    failed          a node has failed: the others end
    node_K.json     how node K ended
    outcome.json    how the attempt ended
    alive_K         written again and again by node K as long as it lives
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING, PretrainkitError
from pretrainkit.run.outcome import Outcome

MEETING_S = 600
"""Longest wait for the other nodes to come: containers are unpacked meanwhile (assumed)."""
END_S = 90
"""Longest wait for the other nodes' ends."""
HEARTBEAT_S = 10
DEAD_AFTER_S = 180
"""A node that has been silent so long is gone (assumed: far above what a shared disk caches)."""
_POLL_S = 0.2
_STORE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Rendezvous:
    """Where the agents of a job with several nodes meet: a store that the head holds open."""

    store: Any
    """torch.distributed.TCPStore, connected."""
    address: str
    port: int
    node: int
    num_nodes: int


def open_store() -> Any:
    """A store on a port of the system's choice, held from now on: no other job can take it."""
    from torch.distributed import TCPStore

    return TCPStore("0.0.0.0", 0, is_master=True, timeout=_STORE_TIMEOUT, wait_for_workers=False)


def connect_store(address: str, port: int) -> Any:
    """The head's store, from another node."""
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT)


@dataclass(frozen=True)
class Head:
    """What the head tells the other nodes."""

    address: str
    port: int
    log_dir: str
    refused: str | None = None
    """Why nothing starts."""
    exit_code: int = EXIT_DONE
    """With which all nodes end then."""


class Meeting:
    """One node's view of the folder of a start."""

    def __init__(self, folder: Path, node: int, num_nodes: int) -> None:
        self.folder, self.node, self.num_nodes = folder, node, num_nodes
        self._last_beat_s = 0.0
        self._seen_beats: dict[int, tuple[str, float]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def is_head(self) -> bool:
        """Whether this node leads."""
        return self.node == 0

    def publish(self, head: Head) -> None:
        """Tell the other nodes where to come, or that nothing starts."""
        files.write_json(self.folder / "head.json", asdict(head))

    def wait_for_head(self) -> Head:
        """What the head tells. Raises PretrainkitError when it doesn't come."""
        self._wait(lambda: self._has("head.json"), MEETING_S, "node 0 has not come")
        return Head(**files.read_json(self.folder / "head.json"))

    def report_ready(self, problem: str = "") -> None:
        """Say that this node may start, or why not."""
        files.write_json(self.folder / f"ready_{self.node}.json", {"host": socket.gethostname(), "problem": problem})

    def wait_for_all(self) -> None:
        """The head's wait until every node is ready. Raises PretrainkitError that names the nodes that aren't."""
        nodes = range(self.num_nodes)
        try:
            self._wait(lambda: all(self._has(f"ready_{node}.json") for node in nodes), MEETING_S, "nodes are missing")
        except PretrainkitError:
            missing = [str(node) for node in nodes if not self._has(f"ready_{node}.json")]
            raise PretrainkitError(
                f"node {', '.join(missing)} of {self.num_nodes} (counted from 0) has not come in {MEETING_S} s",
                action="read the job's log for what its start said",
            ) from None
        reports = {node: files.read_json(self.folder / f"ready_{node}.json") for node in nodes}
        bad = [
            f"node {node} ({report['host']}): {report['problem']}"
            for node, report in reports.items()
            if report["problem"]
        ]
        if bad:
            raise PretrainkitError("; ".join(bad), action="exclude the node from the job, or tell its administrators")
        (self.folder / "go").touch()

    @property
    def hosts(self) -> list[str]:
        """The nodes' names, once all are ready."""
        return [str(files.read_json(self.folder / f"ready_{node}.json")["host"]) for node in range(self.num_nodes)]

    def wait_for_go(self) -> bool:
        """Another node's wait until all are ready; False when the start was given up."""
        self._wait(lambda: self._has("go") or self._has("failed"), 2 * MEETING_S, "node 0 has not said go")
        return not self._has("failed")

    def ask_to_stop(self) -> None:
        """Let the ranks of all nodes save and end."""
        (self.folder / "stop").touch()

    @property
    def must_stop(self) -> bool:
        """Whether somebody asked for it."""
        return self._has("stop")

    def report_failure(self) -> None:
        """Let all nodes end at once: one has failed."""
        (self.folder / "failed").touch()

    @property
    def has_failed(self) -> bool:
        """Whether a node has failed, or is gone: the head looks at all others, they at the head."""
        return self._has("failed") or bool(self._gone())

    def beat(self) -> None:
        """Show that this node lives; cheap enough for every poll."""
        if time.monotonic() - self._last_beat_s > HEARTBEAT_S:
            self._last_beat_s = time.monotonic()
            (self.folder / f"alive_{self.node}").write_text(f"{time.time()}\n")

    def report_end(self, outcome: Outcome, *, is_consequence: bool) -> None:
        """Say how this node ended, and whether that followed from another node's failure."""
        path = self.folder / f"node_{self.node}.json"
        files.write_json(path, {**asdict(outcome), "host": socket.gethostname(), "is_consequence": is_consequence})

    def agree(self) -> Outcome:
        """The outcome of the attempt: the head waits for the others' ends, the others for the head's word."""
        if not self.is_head:
            self._wait(lambda: self._has("outcome.json"), 2 * END_S, "node 0 has not said how it ended")
            return Outcome(**files.read_json(self.folder / "outcome.json"))
        names = {node: f"node_{node}.json" for node in range(self.num_nodes)}
        end_s = time.monotonic() + END_S
        while not all(self._has(name) for name in names.values()) and time.monotonic() < end_s:
            self.beat()
            time.sleep(_POLL_S)
        reports = {
            node: files.read_json(self.folder / name) if self._has(name) else None for node, name in names.items()
        }
        outcome = combined(reports)
        files.write_json(self.folder / "outcome.json", asdict(outcome))
        return outcome

    def _has(self, name: str) -> bool:
        # Listing the folder makes network file systems look again.
        return name in os.listdir(self.folder)  # noqa: PTH208

    def _gone(self) -> list[int]:
        """Nodes whose signs of life have not changed for too long; clocks of other machines don't matter."""
        now_s, gone = time.monotonic(), []
        for node in range(1, self.num_nodes) if self.is_head else [0]:
            try:
                beat = (self.folder / f"alive_{node}").read_text()
            except OSError:
                continue
            # It may be empty: just being written.
            if node not in self._seen_beats or beat != self._seen_beats[node][0]:
                self._seen_beats[node] = (beat, now_s)
            if now_s - self._seen_beats[node][1] > DEAD_AFTER_S:
                gone.append(node)
        return gone

    def _wait(self, condition: Callable[[], bool], longest_s: float, found: str) -> None:
        end_s = time.monotonic() + longest_s
        while not condition():
            if time.monotonic() > end_s:
                raise PretrainkitError(f"{found} in {longest_s:.0f} s", where=str(self.folder))
            self.beat()
            time.sleep(_POLL_S)


def combined(reports: dict[int, dict[str, Any] | None]) -> Outcome:
    """The outcome of an attempt from those of its nodes (None: the node did not say): a first cause comes first."""
    silent = [node for node, report in reports.items() if report is None]
    told = {node: report for node, report in reports.items() if report is not None}
    failed = {node: report for node, report in told.items() if report["exit_code"] not in (EXIT_DONE, 85)}
    causes = {node: report for node, report in failed.items() if not report["is_consequence"]}
    if silent and not causes:
        return Outcome(EXIT_FAILED, None, f"node {', '.join(map(str, silent))} ended without a word: killed, or lost")
    for node, report in (causes or failed).items():
        return Outcome(
            report["exit_code"], report["failed_rank"], f"node {node} ({report['host']}): {report['reason']}"
        )
    for report in told.values():
        if report["exit_code"] == EXIT_STOPPED_AFTER_SAVING:
            return Outcome(report["exit_code"], report["failed_rank"], report["reason"])
    return Outcome(EXIT_DONE)


def own_address(names: list[str]) -> str:
    """An address of this machine that others reach: the first of the names, or else the host's own, that isn't local.

    On a machine whose name stands for the loopback that is the answer: then all nodes must be this machine.
    """
    fallback = "127.0.0.1"
    own = {item[4][0] for item in _addresses(socket.gethostname())} | {"127.0.0.1"}
    for name in [*names, socket.gethostname(), socket.getfqdn()]:
        for *_, address in _addresses(name):
            if not address[0].startswith("127.") and (address[0] in own or name == socket.gethostname()):
                return str(address[0])
    return fallback


def _addresses(name: str) -> list[Any]:
    try:
        return socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
