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

    executor: str = option("local", "torchrun on this machine, or a scheduler (sge: Grid Engine)", choices=EXECUTORS)
    site: str | None = option(None, "site file with the cluster's options: a name from configs/site, or a path")
    account: str | None = option(
        None, "account, project or group to charge", short="-a", unset=f"{DEFAULT_SLURM_ACCOUNT} for Slurm, else none"
    )
    account_option: str | None = option(
        None, "submit option for the account (TSUBAME: -g)", flag=None, unset="-A for PBS, -P for Grid Engine"
    )
    partition: str | None = option(
        None,
        "Slurm partition, or queue of PBS and Grid Engine",
        short="-p",
        unset=f"{DEFAULT_SLURM_PARTITION} for Slurm, else the scheduler's",
    )
    cpu_partition: str | None = option(None, "partition or queue of jobs without GPUs", flag=None, unset="partition")
    resources: tuple[str, ...] = option(
        (), "sbatch options without -- ('gpus-per-node=8'), or what follows -l in PBS and Grid Engine", flag=None
    )
    cpu_resources: tuple[str, ...] = option((), "resources of jobs without GPUs", flag=None)
    scheduler_options: tuple[str, ...] = option(
        (), "more header lines of the job script, as they follow #PBS or #$; for Slurm without --", flag=None
    )
    num_nodes: int = option(1, "number of nodes", short="-N", range="> 0")
    num_gpus: int = option(8, "GPUs per node, or processes per node on CPU", short="-G", range="> 0")
    slots_per_gpu: int | None = option(
        None, "Grid Engine slots per GPU; nodes with fewer are refused", flag=None, unset="not checked", range="> 0"
    )
    cpus_per_task: int | None = option(
        None, "CPU cores per node of a run, or per array task", unset="the scheduler's", range="> 0"
    )
    accelerator: str = option(
        "auto", "auto: GPUs if there are any or a scheduler is used", choices=("auto", "cpu", "gpu")
    )
    gpu_name: str | None = option(None, "GPU model for estimates, such as 'A100 40GB'", unset="auto-detected locally")
    gpu_memory_gib: float | None = option(
        None, "GiB of memory per GPU, for estimates", unset="by --gpu_name", range="> 0"
    )
    node_launcher: str = option(
        "ssh",
        "starts a process on each node under PBS (ssh, pbsdsh, mpirun) and Grid Engine (ssh, qrsh, mpirun)",
        flag=None,
        choices=("ssh", "pbsdsh", "qrsh", "mpirun"),
    )
    modules: tuple[str, ...] = option((), "environment modules to load on each node, outside the container", flag=None)
    setup: tuple[str, ...] = option((), "bash lines to run on each node after loading the modules", flag=None)
    environment: dict[str, str] = option({}, "environment variable of the ranks or tasks", flag="--env")
    python: str | None = option(
        None, "Python of the job", flag=None, unset="python3 in a container, else the one that submits"
    )
    cache_dir: str | None = option(
        None, "folder for the caches of hub, Triton, W&B and images", flag=None, unset="their defaults, in the home"
    )
    container_runtime: str = option(
        "auto",
        "auto: pyxis with Slurm, else apptainer if there is an image",
        choices=("auto", "pyxis", "apptainer", "none"),
    )
    container_image: str | None = option(
        None,
        ".sqsh, .sif, sandbox folder or registry name; empty: no container",
        short="-i",
        unset=f"{DEFAULT_PYXIS_IMAGE} with pyxis",
    )
    container_mounts: tuple[str, ...] = option(
        (), "SOURCE[:TARGET[:ro]] to mount besides the run's own paths; of several for one target the last wins"
    )
    nv: bool | None = option(None, "give an Apptainer container the host's NVIDIA driver", unset="on for GPU")
    chain: int = option(
        1, "jobs to submit in a row; each continues where its predecessor hit its time limit", range="> 0"
    )
    requeue: bool = option(False, "requeue the job each time it hits its time limit")
    check_nodes: bool = option(True, "check each node before the ranks start; a bad node ends the job", flag=None)
    login_host: str | None = option(
        None, "host with the same files to run the scheduler's commands on, over ssh", flag=None, unset="this machine"
    )
    login_user: str | None = option(None, "user name on login_host", flag=None, unset="ssh's default")
    login_port: int | None = option(None, "ssh port of login_host", flag=None, unset="ssh's default")
    login_identity: str | None = option(None, "private key file for login_host", flag=None, unset="ssh's default")

    @property
    def is_scheduled(self) -> bool:
        """Whether a scheduler starts it."""
        return self.executor in SCHEDULERS

    @property
    def runtime(self) -> str:
        """The container runtime: pyxis, apptainer or none."""
        if self.container_runtime != "auto":
            return self.container_runtime
        if self.container_image == "":
            return "none"
        if self.executor == "slurm":
            return "pyxis"
        return "apptainer" if self.container_image else "none"
