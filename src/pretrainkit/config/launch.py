"""The options of where and how something runs: the section launch, which sites fill in and all commands share."""

from __future__ import annotations

from dataclasses import dataclass

from pretrainkit.config.option import option

SCHEDULERS = ("slurm", "pbs", "sge")
EXECUTORS = ("local", *SCHEDULERS)
DEFAULT_SLURM_ACCOUNT = "root"
DEFAULT_SLURM_PARTITION = "defq"
DEFAULT_PYXIS_IMAGE = "nvcr.io/nvidia/nemo:dev"


@dataclass(frozen=True)
class LaunchConfig:
    """Where the ranks of a run, or the tasks of a tool, run.

    Strings of `resources` and `scheduler_options` may contain {num_nodes}, {num_gpus} (per node), {num_ranks} (in all)
    and {num_cpus} (cpus_per_task).
    """

    executor: str = option(
        "local",
        "what starts the ranks: torchrun on this machine, Slurm, PBS (OpenPBS, PBS Pro) or Grid Engine",
        choices=EXECUTORS,
    )
    site: str | None = option(
        None, "site file with options of the cluster: a name from configs/site, or the path of a YAML file"
    )
    account: str | None = option(
        None, "account, project or group to charge", short="-a", unset=f"{DEFAULT_SLURM_ACCOUNT} for Slurm, else none"
    )
    account_option: str | None = option(
        None,
        "option of the submit command that takes the account (TSUBAME: -g)",
        flag=None,
        unset="-A for PBS, -P for Grid Engine",
    )
    partition: str | None = option(
        None,
        "Slurm partition, or queue of PBS and Grid Engine",
        short="-p",
        unset=f"{DEFAULT_SLURM_PARTITION} for Slurm, else the scheduler's default",
    )
    cpu_partition: str | None = option(None, "partition or queue of jobs without GPUs", flag=None, unset="partition")
    resources: tuple[str, ...] = option(
        (),
        "resource requests: sbatch options without -- ('gpus-per-node=8'), or what follows -l in PBS and Grid Engine",
        flag=None,
    )
    cpu_resources: tuple[str, ...] = option((), "resource requests of jobs without GPUs", flag=None)
    scheduler_options: tuple[str, ...] = option(
        (), "more header lines of the job script, as they follow #PBS or #$; for Slurm without --", flag=None
    )
    num_nodes: int = option(1, "number of nodes", short="-N", range="> 0")
    num_gpus: int = option(8, "GPUs per node, or processes per node on CPU", short="-G", range="> 0")
    slots_per_gpu: int | None = option(
        None,
        "Grid Engine slots that come with a GPU: a node with fewer than num_gpus times as many is refused",
        flag=None,
        unset="not checked",
        range="> 0",
    )
    cpus_per_task: int | None = option(
        None, "CPU cores per node of a run, or per array task", unset="the scheduler's default", range="> 0"
    )
    accelerator: str = option(
        "auto",
        "what the ranks train on; auto: GPUs if this machine has any or a scheduler is used",
        choices=("auto", "cpu", "gpu"),
    )
    gpu_name: str | None = option(
        None, "GPU model for the estimates, such as H100 or 'A100 40GB'", unset="auto-detected for local runs"
    )
    gpu_memory_gib: float | None = option(
        None, "memory of each GPU in GiB, for the estimates", unset="that of --gpu_name", range="> 0"
    )
    node_launcher: str = option(
        "ssh",
        "what starts a process on each node under PBS (ssh, pbsdsh, mpirun) and Grid Engine (ssh, qrsh, mpirun)",
        flag=None,
        choices=("ssh", "pbsdsh", "qrsh", "mpirun"),
    )
    modules: tuple[str, ...] = option((), "environment modules to load on each node, outside the container", flag=None)
    setup: tuple[str, ...] = option(
        (), "bash lines to run on each node after loading the modules, outside the container", flag=None
    )
    environment: dict[str, str] = option(
        {}, "environment variable of the ranks or tasks, inside the container; of several, the last wins", flag="--env"
    )
    python: str | None = option(
        None,
        "Python interpreter of the job",
        flag=None,
        unset="python3 in a container, else the one that submits",
    )
    cache_dir: str | None = option(
        None,
        "folder on a group disk for the caches of hub, Triton, W&B and container images",
        flag=None,
        unset="their defaults in the home",
    )
    container_runtime: str = option(
        "auto",
        "container runtime; auto: pyxis with Slurm, else apptainer if there is an image",
        choices=("auto", "pyxis", "apptainer", "none"),
    )
    container_image: str | None = option(
        None,
        ".sqsh, .sif, sandbox folder or registry name; empty: no container",
        short="-i",
        unset=f"{DEFAULT_PYXIS_IMAGE} with pyxis",
    )
    container_mounts: tuple[str, ...] = option(
        (),
        "SOURCE[:TARGET[:ro]] to mount besides the paths of the run, which are always mounted; of several with the "
        "same target, the last wins",
    )
    nv: bool | None = option(None, "mount the host's NVIDIA driver into an Apptainer container", unset="on for GPU")
    chain: int = option(
        1, "jobs to submit in a row; each continues where its predecessor reached its time limit", range="> 0"
    )
    requeue: bool = option(False, "requeue the job each time it reaches its time limit")
    check_nodes: bool = option(
        True, "check each node of a job before the ranks start; a bad node ends the job and is named", flag=None
    )
    login_host: str | None = option(
        None,
        "login node on which Slurm's commands are run over ssh; it must see the same files",
        flag=None,
        unset="this machine",
    )
    login_user: str | None = option(None, "user name on login_host", flag=None, unset="ssh's default")
    login_port: int | None = option(None, "ssh port of login_host", flag=None, unset="ssh's default")
    login_identity: str | None = option(None, "private key file for login_host", flag=None, unset="ssh's default")

    @property
    def is_scheduled(self) -> bool:
        """Whether a scheduler starts it."""
        return self.executor in SCHEDULERS
