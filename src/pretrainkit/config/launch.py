"""Where and how something runs: the part of the schema that sites fill in and all commands share."""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEDULERS = ("slurm", "pbs", "sge")
EXECUTORS = ("local", *SCHEDULERS)
DEFAULT_SLURM_ACCOUNT = "root"
DEFAULT_SLURM_PARTITION = "defq"
DEFAULT_PYXIS_IMAGE = "nvcr.io/nvidia/nemo:dev"


@dataclass(frozen=True)
class LaunchConfig:
    """Where the ranks of a run, or the tasks of a tool, run.

    Texts of `resources` and `scheduler_options` may hold {num_nodes}, {num_gpus} (a node), {num_ranks} (in all) and
    {num_cpus} (cpus_per_task).
    """

    executor: str = "local"
    """local (torchrun on this machine), slurm, pbs (OpenPBS, PBS Pro) or sge (Grid Engine)."""
    site: str | None = None
    """A file of configs/site without .yaml, or the path of one: fields of this section, without 'launch:'."""
    account: str | None = None
    """Account, project or group that pays; unset: root for Slurm, none for PBS and Grid Engine."""
    account_option: str | None = None
    """Option of the submit command that takes the account; unset: -A for PBS, -P for Grid Engine (TSUBAME: -g)."""
    partition: str | None = None
    """Slurm partition, or queue of PBS and Grid Engine; unset: defq for Slurm, the site's default elsewhere."""
    cpu_partition: str | None = None
    """The same for jobs without GPUs; unset: partition."""
    resources: tuple[str, ...] = ()
    """Resource requests: sbatch options without -- ('gpus-per-node=8'), or what follows -l in PBS and Grid Engine."""
    cpu_resources: tuple[str, ...] = ()
    """The same for jobs without GPUs."""
    scheduler_options: tuple[str, ...] = ()
    """Further lines of the job script's header, as they stand after #PBS or #$; for Slurm without --."""
    num_nodes: int = 1
    num_gpus: int = 8
    """Processes per node: one per GPU, or CPU processes with accelerator cpu."""
    slots_per_gpu: int | None = None
    """Grid Engine slots that come with a GPU: a node with fewer than num_gpus times as many is refused."""
    cpus_per_task: int | None = None
    """CPU cores of a node of the run, or of an array's task."""
    accelerator: str = "auto"
    """auto, cpu or gpu; auto: gpu where this machine has one or a scheduler is used."""
    gpu_name: str | None = None
    """The GPUs' model, such as H100 or A100 40GB, for estimates; unset: this machine's, where the run is local."""
    gpu_memory_gib: float | None = None
    """Memory of each GPU in GiB, for estimates; unset: by gpu_name."""
    node_launcher: str = "ssh"
    """What starts a process on each node under PBS and Grid Engine: ssh, pbsdsh (PBS), qrsh (Grid Engine), mpirun."""
    modules: tuple[str, ...] = ()
    """Environment modules to load on each node, outside the container."""
    setup: tuple[str, ...] = ()
    """Lines of bash to run on each node, outside the container, after the modules."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the ranks and tasks, inside the container; of several sources by name, the last wins."""
    python: str | None = None
    """Python of the job; unset: python3 in a container, else the one that submits."""
    cache_dir: str | None = None
    """Folder on a group disk for what would fill the home: hub, Triton, W&B, container images."""
    container_runtime: str = "auto"
    """pyxis (Slurm), apptainer or none; auto: pyxis with slurm, else apptainer if an image is given."""
    container_image: str | None = None
    """.sqsh, .sif, sandbox folder or registry name; empty: none; unset: nvcr.io/nvidia/nemo:dev with pyxis."""
    container_mounts: tuple[str, ...] = ()
    """SOURCE[:TARGET[:ro]]; of several sources by target, the last wins. What a run reads is mounted anyway."""
    nv: bool | None = None
    """Apptainer's --nv, the host's NVIDIA driver; unset: with accelerator gpu."""
    chain: int = 1
    """Jobs in a row, each of which goes on where its predecessor's time was over."""
    requeue: bool = False
    """Put a job whose time is over back into the queue, as often as it takes."""
    check_nodes: bool = True
    """Look at each node of a job before the ranks start; a bad node ends the job, by name."""
    login_host: str | None = None
    """Login node on which Slurm's commands are run, by ssh; it must see the same files; unset: this machine."""
    login_user: str | None = None
    login_port: int | None = None
    login_identity: str | None = None
    """Private key file for login_host; unset: ssh's own choice."""

    @property
    def is_scheduled(self) -> bool:
        """Whether a scheduler starts it."""
        return self.executor in SCHEDULERS
