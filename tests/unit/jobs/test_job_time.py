"""The time a job has left, in the words of each scheduler."""

from __future__ import annotations

import pytest

from pretrainkit.jobs import job_time

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
def test_slurm(text: str, seconds: float | None) -> None:
    assert job_time.parse_squeue(text) == seconds


def test_pbs() -> None:
    assert job_time.parse_pbs(PBS) == 49 * 60 + 30
    assert job_time.parse_pbs("Resource_List.walltime = 00:05:00\n") == 300
    assert job_time.parse_pbs("nothing") is None


def test_grid_engine() -> None:
    text = "cwd:  /tmp\nhard resource_list:         gpu=1,h_rt=5400\nsoft resource_list: h_rt=1\n"
    assert job_time.parse_grid_engine_limit(text) == 5400
    assert job_time.parse_grid_engine_limit("hard_resource_list:  h_rt=60") == 60
    assert job_time.parse_grid_engine_limit("cwd: /tmp") is None
    start = job_time.parse_grid_engine_start
    third, fourth, single = (start(QSTAT_XML, job, task) for job, task in (("7", "3"), ("7", "4"), ("8", "undefined")))
    assert third and fourth and single
    assert (fourth - third, single - fourth) == (60, 60)
    assert start(QSTAT_XML, "9", "1") is None
    assert start("not XML", "7", "3") is None


def test_outside_a_job_there_is_no_limit() -> None:
    assert job_time.time_left({}) is None
    assert job_time.time_left({"JOB_ID": "5"}) is None
