"""What schedulers say about a job's nodes is read right, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrainkit.errors import RequestError
from pretrainkit.jobs.allocation import expand_counts, expand_hosts, grid_engine_gpus, read_allocation

HOSTS = {
    "n1": ["n1"],
    "n1,n2": ["n1", "n2"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[01-03,7]": ["n01", "n02", "n03", "n7"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[1,3],m[2-3],x": ["n1", "n3", "m2", "m3", "x"],
    "gpu-[1-2]-ib": ["gpu-1-ib", "gpu-2-ib"],
    "r[1-2]n[1-2]": ["r1n1", "r1n2", "r2n1", "r2n2"],
    "a.b.example,a[5-6].example": ["a.b.example", "a5.example", "a6.example"],
    "n[7]": ["n7"],
}


@pytest.mark.parametrize(("text", "hosts"), HOSTS.items(), ids=list(HOSTS))
def test_slurms_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n1,,n2", "n]1["])
def test_other_lists_of_hosts_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="host"):
        expand_hosts(text)


COUNTS = {"4": [4], "1(x2)": [1, 1], "4(x2),3": [4, 4, 3], "2,3(x1),1": [2, 3, 1]}


@pytest.mark.parametrize(("text", "counts"), COUNTS.items(), ids=list(COUNTS))
def test_slurms_lists_of_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


def test_another_list_of_counts_is_refused() -> None:
    with pytest.raises(RequestError, match=r"4\(x2\),3"):
        expand_counts("4x2")


def test_hosts_come_once_and_in_the_schedulers_order(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n2\nn2\nn1\nn1\nn1\n")
    pbs = read_allocation({"PBS_NODEFILE": str(nodes)})
    nodes.write_text("n2 4 all.q@n2 UNDEFINED\nn1 2 all.q@n1 UNDEFINED\nn1 2 gpu.q@n1 UNDEFINED\n")
    grid_engine = read_allocation({"PE_HOSTFILE": str(nodes)})
    assert pbs and (pbs.hosts, pbs.slots) == (("n2", "n1"), (2, 3))
    assert grid_engine and (grid_engine.hosts, grid_engine.slots) == (("n2", "n1"), (4, 4))
    slurm = read_allocation({"SLURM_JOB_NODELIST": "n[2-3]"})
    assert slurm and slurm.hosts == ("n2", "n3")
    assert read_allocation({"PBS_NODEFILE": str(tmp_path / "gone")}) is None


def test_a_resource_map_of_grid_engine_gives_the_gpus() -> None:
    assert grid_engine_gpus({"SGE_HGR_gpu": "GPU2 GPU3"}) == "2,3"
    assert grid_engine_gpus({"SGE_HGR_gpu_card": "0"}) == "0"
    assert grid_engine_gpus({"SGE_HGR_license": "1", "PATH": "/bin"}) is None
