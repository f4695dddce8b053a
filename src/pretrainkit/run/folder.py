"""The folder of a run: every path and file name in it is defined here.

experiments/EXPERIMENT/
  run.json  dry_run.json        the resolved run of the last start, which ranks read, and of a later dry run
  source.txt                    code, packages, data and command of the last start
  metrics.jsonl                 records of all attempts: steps, evaluations, events
  skipped_samples.json          samples that are left out since a rollback (`pretrainkit.run.skipped_samples`)
  attempts.jsonl                their starts, saves and stops alone
  checkpoints/step_00000500/    weights/, context/ and, written last, the commit mark complete.json
  logs/attempt_1/               run.json, source.txt, outcome.json, node.log, node.pid, job.json, progress_0.json, logs
                                and stacks of the ranks
  jobs/job_001/                 scheduler jobs (`pretrainkit.jobs.submit`)
  evaluations/                  scores of checkpoints (`pretrainkit.run.evaluations`)
  index/                        Megatron's sample indices of the dataset
  wandb_id.txt  wandb_sent_step.txt  mlflow_id.txt  mlflow.db  run.png
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pretrainkit import files
from pretrainkit.checkpoint import checksums
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger

RUN_FILE, SOURCE_FILE = "run.json", "source.txt"
OUTCOME_FILE, JOB_FILE, PID_FILE, NODE_LOG = "outcome.json", "job.json", "node.pid", "node.log"
"""In an attempt's log folder: how it ended (`pretrainkit.run.outcome`), the scheduler job it belongs to with the
checkpoint it started from, and id and output of the process that starts the ranks."""
JOBS_FILE = "jobs.jsonl"
"""In the folder of jobs: a record for each job that was submitted."""
COMMIT_MARK = checksums.COMMIT_MARK
"""In a checkpoint: written last, it lists every file with its size and checksums (`pretrainkit.run.checkpoints`)."""
CHAIN_FILE = "chain"
"""In a job's folder: the ids of the jobs of a chain, and of those that PBS jobs have submitted to continue them, in
order, one a line."""
RANKS_LOCK, LAUNCHER_LOCK = ".ranks.lock", ".launcher.lock"
"""Held by the process that has started ranks on this machine, until the last of them has ended; and by pretrain.py from
before run.json is written until the run has ended."""

_CHECKPOINT_PREFIX, _ATTEMPT_PREFIX = "step_", "attempt_"

log = get_logger(__name__)


class RunFolder:
    """The folder of one experiment. Nothing in it need exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file, self.dry_run_file = path / RUN_FILE, path / "dry_run.json"
        self.metrics, self.attempts = path / "metrics.jsonl", path / "attempts.jsonl"
        self.skipped_samples = path / "skipped_samples.json"
        self.checkpoints, self.logs, self.jobs = path / "checkpoints", path / "logs", path / "jobs"
        self.evaluations = path / "evaluations"
        self.dataset_index = path / "index"
        self.wandb_id, self.mlflow_id = path / "wandb_id.txt", path / "mlflow_id.txt"
        """Ids of the runs of trackers, shared by all attempts."""
        self.wandb_sent_step = path / "wandb_sent_step.txt"
        """The last step that W&B is known to have: written when an attempt has ended in order."""
        self.mlflow_database = path / "mlflow.db"
        """Where MLflow writes unless MLFLOW_TRACKING_URI is set."""

    @classmethod
    def of(cls, run: ResolvedRun) -> RunFolder:
        """The folder of a resolved run."""
        return cls(Path(run.experiment_dir))

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after `step` optimizer steps."""
        return self.checkpoints / checkpoint_name(step)

    @property
    def has_started(self) -> bool:
        """Whether the experiment was started, or a job of it submitted."""
        return self.checkpoints.exists() or self.logs.exists() or self.jobs.exists()

    def attempt(self, number: int | str) -> Path:
        """Log folder of an attempt; the first has number 1."""
        return self.logs / f"{_ATTEMPT_PREFIX}{number}"

    def attempt_folders(self) -> list[Path]:
        """The log folders of all attempts, in order."""
        folders = [path for path in self.logs.glob(f"{_ATTEMPT_PREFIX}*") if _attempt_number(path)]
        return sorted(folders, key=_attempt_number)

    def new_attempt_folder(self, *copied: Path) -> Path:
        """Make the log folder of the next attempt, with copies of these files if they exist; the first has number 1."""
        self.logs.mkdir(parents=True, exist_ok=True)
        number = max(map(_attempt_number, self.attempt_folders()), default=0) + 1
        while True:
            folder = self.attempt(number)
            try:
                folder.mkdir()
            except FileExistsError:  # another node of the same job, or another start, was faster
                number += 1
            else:
                for path in filter(Path.is_file, copied):
                    shutil.copyfile(path, folder / path.name)
                return folder


def checkpoint_name(step: int) -> str:
    """Name of the folder of the checkpoint after `step` optimizer steps."""
    return f"{_CHECKPOINT_PREFIX}{step:08d}"


def rank_log_names(rank: int) -> tuple[str, str]:
    """Names of the files with a rank's stdout and stderr in an attempt's folder."""
    return f"rank_{rank}.out", f"rank_{rank}.err"


def rank_stack_name(rank: int) -> str:
    """Name of the file with a rank's stacks, written when it hangs."""
    return f"rank_{rank}.stack"


def shown_logs(log_dir: Path) -> list[Path]:
    """The files of an attempt that are followed on the terminal: the node's log, and rank 0's output."""
    return [log_dir / name for name in (NODE_LOG, *rank_log_names(0))]


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None where it is another folder, or one that was put aside."""
    digits = folder.name.removeprefix(_CHECKPOINT_PREFIX)
    return int(digits) if digits.isdigit() and folder.name != digits else None


def _attempt_number(folder: Path) -> int:
    digits = folder.name.removeprefix(_ATTEMPT_PREFIX)
    return int(digits) if digits.isdigit() else 0


@contextmanager
def locked(folder: RunFolder, name: str) -> Iterator[None]:
    """Hold LAUNCHER_LOCK or RANKS_LOCK of an experiment. Raises RequestError when another process holds it.

    Where the file system has no locks, the run starts without this protection.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(files.locked(folder.path / name))
        except files.LockHeldError as error:
            raise RequestError(
                f"this experiment is running already ({error.holder})",
                action="wait for it, stop it, or choose another --experiment",
                where=str(folder.path),
            ) from None
        yield


def wait_for_ranks(folder: RunFolder, *, longest_s: float) -> None:
    """Wait until no rank of the experiment runs on this machine: those of a killed launcher save and exit.

    Raises RequestError when they are still running after `longest_s`.
    """

    def have_ended() -> bool:
        with suppress(RequestError), locked(folder, RANKS_LOCK):
            return True
        return False

    if not have_ended():
        log.warning("waiting for the ranks of a killed start to save and exit")
        files.wait_until(have_ended, timeout_s=longest_s)
        with locked(folder, RANKS_LOCK):
            pass
