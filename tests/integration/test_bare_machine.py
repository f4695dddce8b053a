"""A run trains on a machine that has next to nothing, and is refused before it writes where it can't."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from namespaces import in_namespace

pytestmark = pytest.mark.integration
PRETRAIN = Path(__file__).parents[2] / "pretraining" / "pretrain.py"


@pytest.fixture
def pretrain(
    tmp_path: Path, make_hf_llama: Callable[..., Path], dataset_prefix: Path
) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Start two ranks for two steps and a checkpoint in `experiments`, after a shell's setup."""
    folder = make_hf_llama()
    words = (
        f"--hf_model_id {folder} --nemo_model {folder} --dataset_path {dataset_prefix.parent} --accelerator cpu -G 2"
    )
    words += " -P 2 -g 4 --sequence_length 128 --split 8,2,0 --val_interval 2 --val_steps 1 --max_steps 2"
    words += f" --experiment bare --experiments_dir {tmp_path / 'experiments'}"
    return lambda setup: in_namespace(setup, [sys.executable, PRETRAIN, *words.split()])


@pytest.mark.skipif(shutil.which("ip") is None, reason="ip (iproute2) sets up the loopback interface")
def test_a_run_needs_no_home_compiler_network_cache_or_tmpdir(
    pretrain: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (closed := tmp_path / "closed").mkdir()
    done = pretrain(f"""
        ip link set lo up
        mount -t tmpfs -o ro none {closed}
        export HOME=/proc/none HF_HOME=/proc/none TMPDIR={closed} PATH={Path(sys.executable).parent}
    """)
    assert done.returncode == 0, done.stderr
    assert "saved step 2" in done.stderr


def test_a_run_without_shared_memory_is_refused_before_it_writes(
    pretrain: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = pretrain("mount -t tmpfs -o ro none /dev/shm")
    assert done.returncode == 2 and "0 B of shared memory can be used in /dev/shm" in done.stderr
    assert not (tmp_path / "experiments").exists()


@pytest.mark.parametrize(
    ("limit", "found"),
    [("-n 64", "a process may open 64 files here"), ("-f 100", "files may have 50.0 KiB here")],
)
def test_a_run_within_low_limits_is_refused_before_it_starts(
    pretrain: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path, limit: str, found: str
) -> None:
    done = pretrain(f"ulimit {limit}")
    assert done.returncode == 2 and found in done.stderr and f"ulimit {limit[:2]} " in done.stderr
    assert not (tmp_path / "experiments" / "bare" / "run.json").exists()


@pytest.mark.skipif(shutil.which("ip") is None, reason="ip (iproute2) sets up the loopback interface")
def test_a_full_disk_is_the_reason_of_the_outcome(
    pretrain: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (experiments := tmp_path / "experiments").mkdir()
    done = pretrain(f"""
        ip link set lo up
        mount -t tmpfs -o size=100m none {experiments}
        (until [ -e {experiments}/bare/metrics.jsonl ]; do sleep 0.02; done
        head -c 200M /dev/zero > {experiments}/filler) 2>/dev/null &
    """)
    assert done.returncode == 1
    assert re.search(r"failed: rank . failed with exit code 1: .*(ENOSPC|is full)", done.stderr), done.stderr
    assert "Logging error" not in done.stderr
