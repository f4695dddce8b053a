"""What schedulers say inside a job: its nodes, its GPUs and the time it has left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pretrainkit.errors import PretrainkitError, RequestError
from pretrainkit.jobs import pbs, sge, slurm
from pretrainkit.jobs.registry import read_allocation, time_left
from pretrainkit.jobs.slurm import expand_hosts

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


MOST_TASKS = {"4": 4, "1(x2)": 1, "4(x2),3": 4, "2,3(x1),1": 3, "10": 10}


@pytest.mark.parametrize(("text", "most"), MOST_TASKS.items(), ids=list(MOST_TASKS))
def test_the_tasks_that_srun_started_on_a_node(text: str, most: int) -> None:
    found = read_allocation({"SLURM_JOB_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": text})
    assert found and found.tasks_per_node == most


def test_hosts_come_once_and_in_the_schedulers_order(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n2\nn2\nn1\nn1\nn1\n")
    on_pbs = read_allocation({"PBS_NODEFILE": str(nodes)})
    nodes.write_text("n2 4 all.q@n2 UNDEFINED\nn1 2 all.q@n1 UNDEFINED\nn1 2 gpu.q@n1 UNDEFINED\n")
    grid_engine = read_allocation({"PE_HOSTFILE": str(nodes)})
    assert on_pbs and (on_pbs.hosts, on_pbs.slots) == (("n2", "n1"), (2, 3))
    assert grid_engine and (grid_engine.hosts, grid_engine.slots) == (("n2", "n1"), (4, 4))
    on_slurm = read_allocation({"SLURM_JOB_NODELIST": "n[2-3]"})
    assert on_slurm and on_slurm.hosts == ("n2", "n3")
    assert read_allocation({"PBS_NODEFILE": str(tmp_path / "gone")}) is None


def test_a_resource_map_of_grid_engine_gives_the_gpus() -> None:
    assert sge.visible_gpus({"SGE_HGR_gpu": "GPU2 GPU3"}) == "2,3"
    assert sge.visible_gpus({"SGE_HGR_gpu_card": "0"}) == "0"
    assert sge.visible_gpus({"SGE_HGR_license": "1", "PATH": "/bin"}) is None


PBS = """Job Id: 12.server
    Job_Name = x
    resources_used.walltime = 00:10:30
    Resource_List.walltime = 01:00:00
"""
QSTAT_XML = """<?xml version='1.0'?>
<job_info  xmlns:xsd="http://www.w3.org/2001/XMLSchema">
  <queue_info>
    <job_list state="running">
      <JB_job_number>7</JB_job_number>
      <JAT_start_time>2026-11-28T03:32:21</JAT_start_time>
      <tasks>3</tasks>
    </job_list>
    <job_list state="running">
      <JB_job_number>7</JB_job_number>
      <JAT_start_time>2026-11-28T03:33:21.500</JAT_start_time>
      <tasks>4</tasks>
    </job_list>
    <job_list state="running">
      <JB_job_number>8</JB_job_number>
      <JAT_start_time>2026-11-28T03:34:21</JAT_start_time>
    </job_list>
  </queue_info>
</job_info>
"""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4:59\n", 299),
        ("1:00:00", 3600),
        ("2-03:00:00", 183600),
        ("UNLIMITED", None),
        ("", None),
        ("INVALID", None),
    ],
)
def test_time_left_under_slurm(text: str, seconds: float | None) -> None:
    assert slurm.parse_time_left(text) == seconds


def test_time_left_under_pbs() -> None:
    assert pbs.parse_time_left(PBS) == 49 * 60 + 30
    assert pbs.parse_time_left("Resource_List.walltime = 00:05:00\n") == 300
    assert pbs.parse_time_left("nothing") is None


def test_time_left_under_grid_engine() -> None:
    text = "cwd:  /tmp\nhard resource_list:         gpu=1,h_rt=5400\nsoft resource_list: h_rt=1\n"
    assert sge.parse_limit(text) == 5400
    assert sge.parse_limit("hard_resource_list:  h_rt=60") == 60
    assert sge.parse_limit("cwd: /tmp") is None
    start = sge.parse_start
    third, fourth, single = (start(QSTAT_XML, job, task) for job, task in (("7", "3"), ("7", "4"), ("8", "undefined")))
    assert third and fourth and single
    assert (fourth - third, single - fourth) == (60, 60)
    assert start(QSTAT_XML, "9", "1") is None
    assert start("not XML", "7", "3") is None


def test_outside_a_job_there_is_no_limit() -> None:
    assert time_left({}, 1) is None
    assert time_left({"JOB_ID": "5"}, 1) is None


@pytest.mark.parametrize(
    "variables", [{"SLURM_JOB_ID": "5"}, {"PBS_JOBID": "5.server"}, {"JOB_ID": "5", "SGE_ROOT": "/sge"}], ids=str
)
def test_a_scheduler_that_does_not_answer_is_waited_for_once(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("squeue", "qstat"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(PretrainkitError, match=r"no answer within 0\.3 s"):
        time_left(variables, 0.3)
