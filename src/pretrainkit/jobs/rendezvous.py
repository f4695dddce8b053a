"""How the nodes of one start of a job find each other, and end with one exit code: small files on the shared disk.

torchrun's own rendezvous needs an address and a port that all nodes know before. Here node 0, the head, opens a store
on a free port and publishes it, so two jobs on a machine never share one. Every start of a job has its own folder:

    head_0.json      address and port of the store, and the attempt's log folder; or why nothing starts
    ready_K.json     node K may start its ranks, or why not
    go               all nodes are ready
    stop             all ranks save and end; the job's script creates it when the scheduler sends a signal
    failed           a node has failed: the others end
    hung             the run is ended because it hung: the job's script lets the chain or a requeue start it again
    end_K.json       how node K ended
    outcome_0.json   how the attempt ended
    alive_K          heartbeat of node K
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING, PretrainkitError, RequestError
from pretrainkit.run.outcome import SUCCESS, Outcome

RENDEZVOUS_S = 600
"""Longest wait for the other nodes at the start, while containers are unpacked (assumed)."""
END_S, EXIT_S = 90, 300
"""Longest waits for the other nodes at the end: after a failure, and for their ranks to exit after the last step."""
HEARTBEAT_S = 10
DEAD_AFTER_S = 180
"""A node without a heartbeat for so long is lost (assumed: far above what a shared disk caches)."""
BAD_NODE_ACTION = "exclude the node from the job, and report it to the cluster's administrators"
STOP, FAILED, HUNG, _GO = "stop", "failed", "hung", "go"


@dataclass(frozen=True)
class Endpoint:
    """The store through which nodes and ranks communicate, and this node's place among them."""

    address: str
    port: int
    node: int = 0
    num_nodes: int = 1


def open_store() -> Any:
    """A TCPStore on a free port; the port is taken for as long as the store exists.

    Raises RequestError where processes of this machine can't connect to each other: torch would try for 5 minutes.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
    except OSError as error:
        raise RequestError(
            f"can't connect to a port of this machine: {error.strerror}",
            needed="a loopback interface that is up, for the ranks to communicate",
            action="ip link set lo up, or start where processes may use the network",
            where="127.0.0.1",
        ) from None
    from torch.distributed import TCPStore

    # With multi_tenant the agent of this process uses the same server instead of opening a second one.
    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def connect_store(address: str, port: int) -> Any:
    """The head's store, from another node."""
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=RENDEZVOUS_S))


@dataclass(frozen=True)
class HeadInfo:
    """What the head publishes for the other nodes."""

    address: str = ""
    port: int = 0
    log_dir: str = ""
    refused: str | None = None
    """Why nothing starts."""
    exit_code: int = EXIT_DONE
    """Exit code of all nodes in that case."""


class Rendezvous:
    """One node's view of the folder of a start."""

    def __init__(self, folder: Path, node: int, num_nodes: int) -> None:
        self.folder, self.node, self.num_nodes = folder, node, num_nodes
        self._heartbeat_s = 0.0
        self._heartbeats: dict[int, tuple[int, float]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def is_head(self) -> bool:
        """Whether this is node 0."""
        return self.node == 0

    def publish(self, head: HeadInfo) -> None:
        """Publish where the store and the logs are, or that nothing starts."""
        self.post("head", asdict(head))

    def wait_for_head(self) -> HeadInfo:
        """What the head has published. Raises PretrainkitError when it doesn't in time."""
        reports = self.collect("head", [0], RENDEZVOUS_S)
        if not reports:
            raise PretrainkitError(f"node 0 has not started in {RENDEZVOUS_S} s", where=str(self.folder))
        return HeadInfo(**reports[0])

    def report_ready(self, problem: str = "") -> None:
        """Report that this node may start its ranks, or why not."""
        self.post("ready", {"host": socket.gethostname(), "problem": problem})

    def wait_until_all_ready(self) -> None:
        """The head's wait for all nodes. Raises PretrainkitError with the nodes that are missing or not ready."""
        reports = self.collect("ready", range(self.num_nodes), RENDEZVOUS_S)
        if missing := sorted(set(range(self.num_nodes)) - set(reports)):
            raise PretrainkitError(
                f"node {', '.join(map(str, missing))} of {self.num_nodes} (counted from 0) has not started in "
                f"{RENDEZVOUS_S} s",
                action="read the beginning of the job's log",
            )
        bad = [f"node {node} ({one['host']}): {one['problem']}" for node, one in reports.items() if one["problem"]]
        if bad:
            raise PretrainkitError("; ".join(bad), action=BAD_NODE_ACTION)
        self.mark(_GO)

    def wait_for_go(self) -> bool:
        """Another node's wait until all are ready; False when nothing starts."""
        if not self._wait(lambda: self.has(_GO) or self.has(FAILED), 2 * RENDEZVOUS_S):
            raise PretrainkitError(f"node 0 has not started in {2 * RENDEZVOUS_S} s", where=str(self.folder))
        return self.has(_GO)  # a rank may have failed since: this node ends its own then, and takes part in the outcome

    @property
    def hosts(self) -> list[str]:
        """Names of the nodes, once all are ready."""
        return [str(files.read_json(self.folder / f"ready_{node}.json")["host"]) for node in range(self.num_nodes)]

    @property
    def should_abort(self) -> bool:
        """Whether another node has failed or is lost: the head watches all others, and they watch the head."""
        now_s = time.monotonic()
        return self.has(FAILED) or any(now_s - last_s > DEAD_AFTER_S for _, last_s in self._heartbeats.values())

    def heartbeat(self) -> None:
        """Show that this node is alive, and note whether the others are; cheap enough for every poll."""
        now_s = time.monotonic()
        if now_s - self._heartbeat_s < HEARTBEAT_S:
            return
        self._heartbeat_s = now_s
        with suppress(FileNotFoundError):  # the head of a preflight has removed the folder: this node is late
            (self.folder / f"alive_{self.node}").touch()  # its time changes on a full disk, too
        for node in range(1, self.num_nodes) if self.is_head else [0]:
            # Opening it makes network file systems look again. Only a change counts, whatever other clocks say.
            with suppress(FileNotFoundError), (self.folder / f"alive_{node}").open("rb") as file:
                time_ns = os.fstat(file.fileno()).st_mtime_ns
                if time_ns != self._heartbeats.get(node, (0, 0))[0]:
                    self._heartbeats[node] = (time_ns, now_s)

    def agree_on_outcome(self, outcome: Outcome, *, is_consequence: bool) -> Outcome:
        """The outcome of the attempt, the same on all nodes: the head combines those of the nodes.

        `is_consequence`: another node's failure ended this one.
        """
        self.post("end", {**asdict(outcome), "host": socket.gethostname(), "is_consequence": is_consequence})
        timeout_s = END_S if self.should_abort else EXIT_S
        if self.is_head:
            ends = self.collect("end", range(self.num_nodes), timeout_s)
            outcome = combine_outcomes({node: ends.get(node) for node in range(self.num_nodes)})
            self.post("outcome", asdict(outcome))
            return outcome
        reports = self.collect("outcome", [0], 2 * timeout_s)
        if not reports:
            raise PretrainkitError(f"node 0 has not reported how it ended in {2 * timeout_s} s", where=str(self.folder))
        return Outcome(**reports[0])

    def post(self, key: str, value: dict[str, Any]) -> None:
        """Write KEY_NODE.json."""
        files.write_json(self.folder / f"{key}_{self.node}.json", value)

    def collect(self, key: str, nodes: Iterable[int], timeout_s: float) -> dict[int, dict[str, Any]]:
        """What nodes have posted, by node, as soon as all have; without those that haven't in time."""
        paths = {node: self.folder / f"{key}_{node}.json" for node in nodes}
        self._wait(lambda: {path.name for path in paths.values()} <= self._names(), timeout_s)
        return {node: files.read_json(path) for node, path in paths.items() if path.name in self._names()}

    def mark(self, name: str) -> None:
        """Show all nodes that the ranks are to save and end (STOP), or that this node has failed (FAILED)."""
        (self.folder / name).touch()

    def has(self, name: str) -> bool:
        """Whether a node, or the job's script, has made such a mark."""
        return name in self._names()

    def _names(self) -> set[str]:
        # Listing the folder makes network file systems look again.
        return set(os.listdir(self.folder)) if self.folder.exists() else set()  # noqa: PTH208

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        def is_fulfilled() -> bool:
            self.heartbeat()
            return condition()

        return files.wait_until(is_fulfilled, timeout_s=timeout_s)


def combine_outcomes(reports: dict[int, dict[str, Any] | None]) -> Outcome:
    """The outcome of an attempt from those of its nodes (None: no report); a first cause wins over its consequences."""
    silent = [str(node) for node, report in reports.items() if report is None]
    ends = {node: report for node, report in reports.items() if report is not None}
    failed = {n: end for n, end in ends.items() if end["exit_code"] not in (EXIT_DONE, EXIT_STOPPED_AFTER_SAVING)}
    causes = {n: end for n, end in failed.items() if not end["is_consequence"]}
    if silent and not causes:
        return Outcome(EXIT_FAILED, None, f"node {', '.join(silent)} ended without a report: killed, or lost")
    for node, end in (causes or failed).items():
        reason = f"node {node} ({end['host']}): {end['reason']}"
        return Outcome(end["exit_code"], end["failed_rank"], reason, bool(end.get("has_hung")))
    saved = (end for end in ends.values() if end["exit_code"] == EXIT_STOPPED_AFTER_SAVING)
    return next((Outcome(end["exit_code"], end["failed_rank"], end["reason"]) for end in saved), SUCCESS)


def own_address(names: list[str]) -> str:
    """An address of this machine that others reach: the first that isn't local of the names, or of the host's own.

    On a machine whose name resolves to the loopback it is that: then all nodes must be this machine.
    """
    own = {item[4][0] for item in _addresses(socket.gethostname())}
    for name in [*names, socket.gethostname(), socket.getfqdn()]:
        for *_, address in _addresses(name):
            if not address[0].startswith("127.") and (address[0] in own or name == socket.gethostname()):
                return str(address[0])
    return "127.0.0.1"


def _addresses(name: str) -> list[Any]:
    try:
        return socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
