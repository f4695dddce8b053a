"""Real schedulers, started for the tests of one file and stopped after them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scheduled import Site

HERE = Path(__file__).parent
INSTALL = "tests/integration/services/install.sh installs them (Debian or Ubuntu, as root)"


def start_service(script: str, programs: list[str]) -> Iterator[None]:
    """Start daemons with one of the scripts here, set the variables that it prints, and stop them at the end."""
    if os.geteuid() != 0:
        pytest.skip(f"{script} starts daemons, which needs root")
    if missing := [program for program in programs if not shutil.which(program)]:
        pytest.skip(f"not installed: {', '.join(missing)}; {INSTALL}")
    with (
        tempfile.TemporaryDirectory(prefix="services_") as state,
        pytest.MonkeyPatch.context() as patch,
        (Path(state) / "output").open("w+") as output,  # not a pipe: daemons would keep it open
    ):
        try:
            subprocess.run([HERE / script, "start", state], check=True, stdout=output, stderr=subprocess.STDOUT)
            output.seek(0)
            for line in output.read().splitlines():
                name, _, value = line.removeprefix("export ").partition("=")
                patch.setenv(name, shlex.split(value)[0])
            yield
        except subprocess.CalledProcessError as error:
            output.seek(0)
            pytest.fail(f"{script} failed: {error}\n{output.read()}")
        finally:
            subprocess.run([HERE / script, "stop", state], check=True)
            assert state not in Path("/etc/hosts").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site on a real Slurm with two virtual nodes."""
    for _ in start_service("slurm.sh", ["munged", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "sbatch"]):
        yield Site.write(tmp_path_factory.mktemp("site"), "slurm", partition="main", cpu_resources=["mem=1500"])


@pytest.fixture(scope="module")
def grid_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site on a real Grid Engine with one node."""
    for _ in start_service("grid_engine.sh", ["sge_qmaster", "sge_execd", "qsub"]):
        folder = tmp_path_factory.mktemp("site")
        yield Site.write(folder, "sge", partition="all.q", scheduler_options=["-pe smp {num_gpus}"])


@pytest.fixture(scope="module")
def openpbs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site on a real OpenPBS with one node; it isn't packaged: OPENPBS says where it is."""
    if "OPENPBS" not in os.environ:
        pytest.skip("OPENPBS names no prefix or source of an OpenPBS: tests/integration/services/openpbs.sh")
    for _ in start_service("openpbs.sh", ["unshare", "nsenter", "ip"]):
        yield Site.write(tmp_path_factory.mktemp("site"), "pbs", partition="workq")


@pytest.fixture(scope="module")
def run_words(make_hf_llama: Callable[..., Path], dataset_prefix: Path) -> list[str]:
    """Flags of pretrain.py for a tiny model on two ranks."""
    model = make_hf_llama()
    text = f"--hf_model_id {model} --nemo_model {model} --dataset_path {dataset_prefix.parent} --accelerator cpu -G 2"
    text += " -P 2 -g 4 --sequence_length 128 --split 8,2,0 --val_interval 0 --lr 1e-3 --start_parity off"
    return text.split()
