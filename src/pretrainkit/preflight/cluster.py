"""The preflight of all nodes of a job at once: each checks itself, then all try to reach each other.

The nodes exchange their reports in a folder of the shared disk, named after the job: a node that mounts another disk
is missing there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pretrainkit.errors import RequestError
from pretrainkit.jobs.registry import read_allocation
from pretrainkit.jobs.rendezvous import HeadInfo, Rendezvous, open_store, own_address
from pretrainkit.preflight.collectives import check_world
from pretrainkit.preflight.node import NodeCheckRequest, check_node, nearest_folder
from pretrainkit.preflight.report import FAILED, SKIPPED, Check, NodeReport
from pretrainkit.records import decode


@dataclass(frozen=True)
class Place:
    """Which of a job's nodes this is."""

    node: int
    """From 0."""
    num_nodes: int
    meeting: str
    """Name of the job, or of this step of it: the same on all nodes, another for each check."""
    hosts: tuple[str, ...] = ()
    """The scheduler's names of the nodes, in order, where it says them."""


def find_place(
    environment: Mapping[str, str], *, node: int | None = None, num_nodes: int | None = None, meeting: str | None = None
) -> Place:
    """This node's place: what is given, else what the scheduler's variables say, else the only node.

    Raises RequestError when there are several nodes and it isn't clear which of them this is.
    """
    if "SLURM_STEP_NUM_NODES" in environment:  # srun has started this on every node
        num_nodes = num_nodes or int(environment["SLURM_STEP_NUM_NODES"])
        node = int(environment["SLURM_NODEID"]) if node is None else node
        meeting = meeting or f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    if num_nodes is None or num_nodes == 1:
        return Place(0, 1, "")
    if node is None or meeting is None:
        raise RequestError(
            f"{num_nodes} nodes, but not which of them this is",
            needed="--node_rank (from 0) and --meeting (any word, the same on all nodes, another for each check)",
            where="--num_nodes",
        )
    if not 0 <= node < num_nodes:
        raise RequestError(f"{node} of {num_nodes} nodes", needed=f"0 to {num_nodes - 1}", where="--node_rank")
    allocation = read_allocation(environment)
    hosts = allocation.hosts if allocation and len(allocation.hosts) == num_nodes else ()
    return Place(node, num_nodes, meeting, hosts)


def check_nodes(request: NodeCheckRequest, place: Place) -> tuple[list[NodeReport], Check | None]:
    """The reports of all nodes, and how they reach each other (None for one node); the same on every node."""
    report = check_node(request)
    if place.hosts:
        report = replace(report, host=place.hosts[place.node])
    if place.num_nodes == 1:
        return [report], None
    folder, numbers = nearest_folder(request.output_dir) / f".check_node-{place.meeting}", range(place.num_nodes)
    try:
        nodes = Rendezvous(folder, place.node, place.num_nodes)
        nodes.post("report", report.to_json())
    except OSError:  # the report says it; the others will miss this node
        return [report], Check("network", SKIPPED, "the nodes need a shared folder to exchange their reports")
    found = nodes.collect("report", numbers, request.timeout_s)
    words = f"no report in the shared folder within {request.timeout_s:.0f} s"
    absent = (Check("presence", FAILED, words, "check that the node is up and mounts the same output folder"),)
    names = place.hosts or [f"number {node}" for node in numbers]
    reports = [
        decode(NodeReport, found[node], known_only=False) if node in found else NodeReport(names[node], absent)
        for node in numbers
    ]
    if not all(one.is_good for one in reports) or not request.collectives:
        network = Check("network", SKIPPED, "not tried" + ("" if request.collectives else ": --quick"))
    else:
        network = _check_network(nodes, request, place.hosts or [one.host for one in reports])
    nodes.post("done", {})
    if nodes.is_head:
        nodes.collect("done", numbers, request.timeout_s / 4)
        shutil.rmtree(folder, ignore_errors=True)
    return reports, network


def _check_network(nodes: Rendezvous, request: NodeCheckRequest, hosts: Sequence[str]) -> Check:
    if nodes.is_head:
        store = open_store()
        nodes.publish(HeadInfo(own_address([hosts[0]]), store.port))
    head = nodes.collect("head", [0], request.timeout_s)
    if not head:
        return Check("network", FAILED, f"node 0 ({hosts[0]}) has not published its address")
    return check_world(request, nodes, head[0]["address"], head[0]["port"], hosts=hosts)
