"""The program that is diagnosed, as commands that can be started with other settings: the three kinds of source."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrainkit.config.run_file import read_run, write_run
from pretrainkit.config.schema import ResolvedRun, TrackingConfig
from pretrainkit.errors import RequestError
from pretrainkit.jobs.run_job import rank_environment
from pretrainkit.launch.local import LaunchPlan
from pretrainkit.megatron.kernels import choose_for, installed_libraries
from pretrainkit.run.folder import RUN_FILE, RunFolder

LONGEST_STEPS = 1_000_000
"""Steps that a run is told to do: more than any diagnosis needs."""
NODE_FLAGS = ("--nnodes", "--num-machines", "--num-nodes")
"""Of torchrun, accelerate launch, and others."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Program:
    """What is started, once for each measurement."""

    kind: str
    """experiment, script or module."""
    name: str
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the command line sets in front of the command."""
    run: ResolvedRun | None = None
    train_script: Path | None = None

    def start_command(self, scratch: Path, changes: dict[str, Any]) -> list[str]:
        """The command of one start; a run writes its outputs to `scratch`, and takes `changes` of its training."""
        if self.run is None:
            return list(self.command)
        run_file = _scratch_run(self.run, scratch, changes)
        logs = RunFolder(scratch).attempt(1)
        logs.mkdir(parents=True)
        shutil.copyfile(run_file, logs / RUN_FILE)  # ranks read the attempt's
        assert self.train_script
        run = dataclasses.replace(self.run, experiment_dir=str(run_file.parent))
        return LaunchPlan(run, run_file, logs, self.train_script).node_command

    def start_environment(self) -> dict[str, str]:
        """Variables that the program needs; the user's own win, as in a real start."""
        if self.run is None:
            return self.environment
        return {name: value for name, value in rank_environment(self.run).items() if name not in os.environ}


def of_experiment(folder: Path, train_script: Path) -> Program:
    """A run of this project, by its folder. Raises RequestError when it can't be started on this machine."""
    run_file = RunFolder(folder).run_file
    if not run_file.is_file():
        raise RequestError(
            "no run.json here", needed="the folder of an experiment of pretraining/pretrain.py", where=str(folder)
        )
    run = read_run(run_file)
    launch = run.config.launch
    if launch.num_nodes > 1:
        raise RequestError(
            f"the run takes {launch.num_nodes} nodes, the diagnosis starts ranks on this one",
            action="diagnose the same run made for one node (its --data_parallel part changes, not its speed per rank)",
            where=str(run_file),
        )
    missing = [prefix for prefix in run.dataset.prefixes if not any(map(os.path.exists, (prefix, f"{prefix}.idx")))]
    if missing:
        raise RequestError(f"its data is not there: {missing[0]}", action="put it back", where=str(run_file))
    return Program("experiment", folder.resolve().name, run=run, train_script=train_script.resolve())


def of_script(command_line: str) -> Program:
    """A command that trains, such as 'OMP_NUM_THREADS=4 torchrun --nproc_per_node 2 train.py --lr 1e-4'."""
    words = shlex.split(command_line)
    environment = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if not words:
        raise RequestError(
            "no command", needed="'python train.py ...' or 'torchrun ... train.py ...'", where="--script"
        )
    _refuse_several_nodes(words)
    if words[0].endswith(".py"):
        words.insert(0, sys.executable)
    return Program("script", command_line, tuple(words), environment)


def _refuse_several_nodes(words: list[str]) -> None:
    """Raise RequestError where a launcher is told to wait for ranks on other machines."""
    for position, word in enumerate(words):
        flag, given, value = word.partition("=")
        if flag.replace("_", "-") not in NODE_FLAGS:
            continue
        value = value if given else (words[position + 1] if position + 1 < len(words) else "")
        if value.partition(":")[0].isdecimal() and int(value.partition(":")[0]) > 1:
            raise RequestError(
                f"{flag} {value}: the ranks of other nodes can't be started from here",
                action=f"diagnose it on one node ({flag} 1): the speed of a rank shows there, the network between "
                "nodes doesn't (tools/check_node.py measures that)",
                where="--script",
            )


def of_module(name: str) -> Program:
    """A function pkg:function that gives model, loader and optimizer."""
    if not re.fullmatch(r"[\w.]+:\w+", name):
        raise RequestError(f"{name!r}", needed="pkg.module:function", where="--module")
    return Program("module", name, (sys.executable, "-m", "pretrainkit.diagnosis.probes.module_loop", name))


def _scratch_run(run: ResolvedRun, scratch: Path, changes: dict[str, Any]) -> Path:
    """Write the run.json of the same run in another folder: random weights, no end, nothing saved or evaluated."""
    folder = scratch / "experiment"
    training = dataclasses.replace(
        run.config.training,
        max_steps=LONGEST_STEPS,
        save_interval=LONGEST_STEPS,
        val_interval=0,
        time_limit=None,
        restart_limit=0,
        start_parity="off",
        **changes,
    )
    config = dataclasses.replace(
        run.config, experiments_dir=str(scratch), experiment=folder.name, training=training, tracking=TrackingConfig()
    )
    changed = dataclasses.replace(
        run, config=config, experiment_dir=str(folder), initial_weights=None, max_steps=LONGEST_STEPS
    )
    run_file = RunFolder(folder).run_file
    write_run(run_file, dataclasses.replace(changed, kernels=choose_for(changed, installed_libraries())))
    return run_file
