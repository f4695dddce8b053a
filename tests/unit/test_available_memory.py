"""Memory that is left within a job's control groups."""

from __future__ import annotations

from pathlib import Path

import psutil

from pretrainkit.machine import available_memory_bytes


def write_group(folder: Path, limit: str, used: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("1:name=systemd:/x\n0::/slurm/job_1/step_0\n")
    cgroups = tmp_path / "cgroup"
    write_group(cgroups / "slurm" / "job_1" / "step_0", "max", 50, 0)
    write_group(cgroups / "slurm" / "job_1", "1000", 700, 200)
    write_group(cgroups / "slurm", "900000", 700, 0)
    assert available_memory_bytes(cgroups=cgroups, own=own) == 500
    write_group(cgroups / "slurm", "100", 700, 0)
    assert available_memory_bytes(cgroups=cgroups, own=own) == 0


def test_without_groups_the_whole_machine_counts(tmp_path: Path) -> None:
    free = available_memory_bytes(cgroups=tmp_path, own=tmp_path / "nothing")
    assert 0 < free <= psutil.virtual_memory().total
