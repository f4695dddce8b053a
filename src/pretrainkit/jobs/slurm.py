"""Slurm's job scripts and commands, through NeMo-Run.

Of NeMo-Run's Slurm side the executor's script and the tunnels are used, not its experiments: those need accounting, and
put paths, variables and arguments unquoted into commands. Here the script starts one file of ours, by a quoted path.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrainkit.errors import PretrainkitError
from pretrainkit.imports import heavy_imports
from pretrainkit.jobs import scripts
from pretrainkit.jobs.job import Job, safe_name
from pretrainkit.jobs.secrets import without_tokens

_CODE_MOUNT, _HIDDEN = "/nemo_run", "/nemo-run-of-a-path"


def slurm_script(job: Job, *, continues: bool) -> str:
    """The text of a Slurm job script, as NeMo-Run's executor writes it.

    Args:
        continues: whether it only goes on where a predecessor's time was over.
    """
    with heavy_imports():
        from nemo_run.core.execution.slurm import SlurmBatchRequest

    # NeMo-Run puts the job's folder for every /nemo_run of a script without container, also of a user's path.
    job = replace(job, folder=Path(str(job.folder).replace(_CODE_MOUNT, _HIDDEN)))
    request = SlurmBatchRequest(
        launch_cmd=["sbatch", "--requeue", "--parsable"],
        jobs=[safe_name(job.name)],
        command_groups=[[shlex.join(["bash", str(job.folder / _inner_script(job))])]],
        executor=_executor(job, continues=continues),
        max_retries=0,
        extra_env={},
    )
    return str(request.materialize()).replace(_HIDDEN, _CODE_MOUNT)


def _inner_script(job: Job) -> str:
    """What srun starts: with pyxis, srun itself enters the container."""
    return scripts.RUN if job.container and job.container.runtime == "pyxis" else scripts.NODE


def _executor(job: Job, *, continues: bool) -> Any:
    from nemo_run import LocalTunnel, Packager, SlurmExecutor

    pattern = "%A_%a" if job.array else "%j"
    log_path = str(job.folder).replace("%", "%%") + f"/slurm-{pattern}.log"
    parameters: dict[str, Any] = {"output": log_path}
    if job.warning_s is not None:
        parameters["signal"] = f"USR1@{job.warning_s}"
    for option in [*job.resources, *job.scheduler_options]:
        name, equals, value = option.removeprefix("--").partition("=")
        parameters[name.replace("-", "_")] = value if equals else True
    if job.array:
        parameters["array"] = str(job.array)
    container = job.container if job.container and job.container.runtime == "pyxis" else None
    executor = SlurmExecutor(
        account="",
        partition=job.partition,
        time=job.time_limit,
        nodes=job.num_nodes,
        ntasks_per_node=1,
        cpus_per_task=job.config.cpus_per_task,
        job_name_prefix="pretrainkit.",
        additional_parameters=parameters,
        array=str(job.array) if job.array else None,
        # NeMo-Run quotes what goes to #SBATCH lines, and nothing of srun's.
        container_image=shlex.quote(container.image) if container else None,
        container_mounts=[shlex.quote(str(mount)) for mount in container.mounts] if container else [],
        # Slurm binds a step that doesn't say how many CPUs it needs to one; --output is appended to by both.
        srun_args=["--open-mode=append", "--cpu-bind=none", *(container.pyxis_options() if container else [])],
        setup_lines=scripts.slurm_setup(job, continues=continues).replace(_CODE_MOUNT, _HIDDEN),
        job_details=_job_details(job, log_path),
        tunnel=LocalTunnel(job_dir=shlex.quote(str(job.folder.parent))),
        packager=Packager(),
    )
    executor.account = job.account  # None: the cluster's default
    executor.experiment_id = safe_name(job.name)
    executor.experiment_dir = str(job.folder.parent)
    executor.job_dir = str(job.folder)
    executor.job_name = safe_name(job.name)
    return executor


def _job_details(job: Job, log_path: str) -> Any:
    """Names and places of the job's log: one file for the script and what srun starts."""
    from nemo_run.core.execution.slurm import SlurmJobDetails

    class OneLog(SlurmJobDetails):
        @property
        def srun_stdout(self) -> Any:
            return shlex.quote(log_path)

    return OneLog(job_name=safe_name(job.name), folder=str(job.folder))


class SlurmCommands:
    """Runs Slurm's commands, here or on the site's login node."""

    def __init__(self, job_config: Any) -> None:
        from nemo_run import LocalTunnel, SSHTunnel
        from rich.console import Console

        self._is_local = job_config.login_host is None
        self._tunnel: Any = LocalTunnel(job_dir="")
        if not self._is_local:
            self._tunnel = SSHTunnel(
                host=job_config.login_host,
                user=job_config.login_user or _user(),
                port=job_config.login_port,
                job_dir="",
                identity=job_config.login_identity,
            )
            self._tunnel.console = Console(stderr=True)  # stdout is for job ids

    def run(self, words: list[str]) -> str:
        """The output of a command. Raises PretrainkitError with its own words when it fails."""
        # The tokens of this process are the job's file's business, not that of the scheduler's records.
        options = {"env": without_tokens(os.environ), "replace_env": True} if self._is_local else {}
        try:
            result = self._tunnel.run(shlex.join(words), hide=True, warn=True, in_stream=False, **options)
        except (SystemExit, OSError) as error:
            raise PretrainkitError(
                "no connection to the login node", action="check login_host, login_user and login_identity of the site"
            ) from error
        if result.exited:
            said = (result.stderr or result.stdout).strip()
            raise PretrainkitError(f"{words[0]} failed with exit code {result.exited}: {said}", where=words[0])
        return str(result.stdout)


def _user() -> str:
    import getpass

    return getpass.getuser()
