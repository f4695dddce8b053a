"""A job is submitted whole or not at all, with the scheduler's own words; tokens are in one file that is its owner's.

The scheduler's commands here are small programs that write down what they hear: real ones can't be made to fail as
wanted. Those are in tests/integration/services.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.errors import PretrainkitError
from pretrainkit.jobs import submit
from pretrainkit.jobs.registry import SCHEDULERS
from pretrainkit.jobs.scheduler import run_here

REPOSITORY = Path(__file__).parents[3]
TOKENS = {"HF_TOKEN": "hf_very_secret_0123456789", "WANDB_API_KEY": "wandb_very_secret_9876543210"}
HEARD = """#!/bin/bash
{ printf '%s ' "${0##*/}" "$@"; echo; env; } >> "$HEARD"
"""
PROGRAMS = {
    "qsub": 'echo "$((1000 + $(grep -c "^qsub " "$HEARD"))).server"',
    "sbatch": 'echo "$((1000 + $(grep -c "^sbatch " "$HEARD")))"',
    "qdel": "true",
    "scancel": "true",
    "qstat": 'echo "qstat: Unknown Job Id $1" >&2; exit 153',
    "squeue": "true",
}

NO_JOB = [".launcher.lock", ".ranks.lock", "run.json"]
"""What a start that was refused leaves of a new experiment."""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a scheduler's commands in PATH, some of them with another body; gives the file of what they hear."""

    def make(**bodies: str) -> Path:
        for name, body in {**PROGRAMS, **bodies}.items():
            path = tmp_path / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(HEARD + body + "\n")
            path.chmod(0o755)
        return tmp_path / "heard"

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HEARD", str(tmp_path / "heard"))
    return make


def pretrain(tmp_path: Path, hf_folder: Path, dataset_folder: Path, *words: str, **environment: str):  # type: ignore[no-untyped-def]
    request = f"--hf_model_id {hf_folder} --dataset_path {dataset_folder} --experiments_dir {tmp_path / 'experiments'}"
    request += " --accelerator cpu -G 2 -g 4 --sequence_length 128 --split 8,2,0 --val_interval 0 -E tiny"
    request += " --container_runtime none"
    command = [sys.executable, str(REPOSITORY / "pretraining" / "pretrain.py"), *request.split(), *words]
    return subprocess.run(
        command, env={**os.environ, **TOKENS, **environment}, capture_output=True, text=True, timeout=120
    )


def test_a_run_is_submitted_to_pbs_as_a_chain_and_its_tokens_stay_with_its_owner(
    programs: Callable[..., Path], tmp_path: Path, hf_folder: Path, dataset_folder: Path
) -> None:
    heard = programs()
    words = ["--executor", "pbs", "-p", "gpu", "-a", "group", "--chain", "3", "--time_limit", "01:00:00"]
    done = pretrain(tmp_path, hf_folder, dataset_folder, *words)
    assert done.returncode == 0, done.stderr
    job = tmp_path / "experiments" / "tiny" / "jobs" / "job_001"
    assert done.stdout.splitlines() == [f"job {1000 + n}  log {job}/pbs-{1000 + n}.log" for n in (1, 2, 3)]
    assert "qdel 1001 1002 1003" in done.stderr
    commands = [line for line in heard.read_text().splitlines() if line.startswith("qsub ")]
    shared = f"qsub -A group -o {job}/scheduler.log"
    assert [command.strip() for command in commands] == [
        f"{shared} {job}/job.pbs.sh",
        f"{shared} -W depend=afterany:1001 {job}/job.continue.pbs.sh",
        f"{shared} -W depend=afterany:1002 {job}/job.continue.pbs.sh",
    ]
    assert (job / "chain").read_text() == "1001\n1002\n1003\n"
    assert [record.job_id for record in submit.read_records(job.parent)] == ["1001", "1002", "1003"]
    with (job.parent / "jobs.jsonl").open("a") as file:
        file.write('{"scheduler": "pbs", "job_')  # a power cut
    assert len(submit.read_records(job.parent)) == 3
    assert (job / "code" / "pretraining" / "train.py").exists()
    assert (job / "code" / "src" / "pretrainkit" / "jobs" / "templates" / "pbs.sh.j2").exists()

    secrets = job / "secrets.sh"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    shown = subprocess.run(
        ["bash", "-c", f'. "{secrets}"; echo $HF_TOKEN $WANDB_API_KEY'], capture_output=True, text=True
    )
    assert shown.stdout.split() == list(TOKENS.values())
    everywhere = [path for path in tmp_path.rglob("*") if path.is_file() and path != secrets]
    texts = [done.stdout.encode(), done.stderr.encode(), *(path.read_bytes() for path in everywhere)]
    assert len(texts) > 50 and not any(token.encode() in text for token in TOKENS.values() for text in texts)


@pytest.mark.parametrize("executor", ["slurm", "sge"])
def test_no_scheduler_hears_a_token(
    executor: str, programs: Callable[..., Path], tmp_path: Path, hf_folder: Path, dataset_folder: Path
) -> None:
    heard = programs()
    words = ["--executor", executor, "--hf_token", TOKENS["HF_TOKEN"]]
    done = pretrain(tmp_path, hf_folder, dataset_folder, *words, PRETRAINKIT_CONTINUES="1", HF_TOKEN="")
    assert done.returncode == 0, done.stderr
    (secrets,) = tmp_path.rglob("secrets.sh")
    assert TOKENS["HF_TOKEN"] in secrets.read_text() and stat.S_IMODE(secrets.stat().st_mode) == 0o600
    for path in tmp_path.rglob("*"):
        if path.is_file() and path != secrets:
            assert not any(token.encode() in path.read_bytes() for token in TOKENS.values()), path
    assert "job.slurm.sh" in heard.read_text() or "job.sge.sh" in heard.read_text()
    assert "PRETRAINKIT_CONTINUES" not in heard.read_text()  # of the job that this was started in


@pytest.mark.parametrize("executor", ["pbs", "slurm"])
def test_a_refused_job_leaves_no_job_and_the_schedulers_words_are_shown(
    executor: str, programs: Callable[..., Path], tmp_path: Path, hf_folder: Path, dataset_folder: Path
) -> None:
    programs(qsub='echo "qsub: Unknown queue" >&2; exit 170', sbatch='echo "sbatch: error: no such" >&2; exit 1')
    done = pretrain(tmp_path, hf_folder, dataset_folder, "--executor", executor, "-p", "nope")
    assert done.returncode == 1 and done.stdout == ""
    assert ("qsub: Unknown queue" if executor == "pbs" else "sbatch: error: no such") in done.stderr
    assert sorted(path.name for path in (tmp_path / "experiments" / "tiny").iterdir()) == NO_JOB


@pytest.mark.parametrize("executor", ["pbs", "slurm"])
def test_a_login_host_runs_the_schedulers_commands(
    executor: str, programs: Callable[..., Path], tmp_path: Path, hf_folder: Path, dataset_folder: Path
) -> None:
    heard = programs(ssh='exec bash -c "${@: -1}"')
    login = ["--executor", executor, "--set", "launch.login_host=head", "--set", "launch.login_port=23"]
    done = pretrain(tmp_path, hf_folder, dataset_folder, *login, "--experiments_dir", str(tmp_path / "a b"))
    assert done.returncode == 0 and done.stdout.startswith("job 1001  log "), done.stderr
    words = "ssh -o StrictHostKeyChecking=accept-new -p 23 head " + ("sbatch" if executor == "slurm" else "qsub")
    assert words in heard.read_text() and f"'{tmp_path}/a b/tiny" in heard.read_text()
    programs(ssh='echo "ssh: connect to host head port 23: Connection refused" >&2; exit 255')
    done = pretrain(tmp_path, hf_folder, dataset_folder, *login)
    assert done.returncode == 1 and "Connection refused" in done.stderr and "check login_host" in done.stderr


def test_a_chain_that_breaks_while_it_is_submitted_is_taken_back(
    programs: Callable[..., Path], tmp_path: Path, hf_folder: Path, dataset_folder: Path
) -> None:
    heard = programs(qsub='[ "$(grep -c "^qsub " "$HEARD")" -lt 3 ] || exit 9; echo "5$(grep -c "^qsub " "$HEARD").s"')
    words = ["--executor", "pbs", "--chain", "4", "--time_limit", "01:00:00"]
    done = pretrain(tmp_path, hf_folder, dataset_folder, *words)
    assert done.returncode == 1 and "qsub failed with exit code 9" in done.stderr
    assert "qdel 51 52" in heard.read_text()
    assert sorted(path.name for path in (tmp_path / "experiments" / "tiny").iterdir()) == NO_JOB


def test_a_submit_command_that_says_nothing_is_a_failure(
    programs: Callable[..., Path], tmp_path: Path, hf_folder: Path, dataset_folder: Path
) -> None:
    programs(qsub="true")
    done = pretrain(tmp_path, hf_folder, dataset_folder, "--executor", "pbs")
    assert done.returncode == 1 and "it printed no job id" in done.stderr


def test_a_second_job_of_an_experiment_is_refused_while_the_first_is_there(
    programs: Callable[..., Path], tmp_path: Path, hf_folder: Path, dataset_folder: Path
) -> None:
    programs()
    assert pretrain(tmp_path, hf_folder, dataset_folder, "--executor", "pbs").returncode == 0
    programs(qstat="echo 1001.server tiny user 0 R gpu")
    done = pretrain(tmp_path, hf_folder, dataset_folder, "--executor", "pbs")
    assert done.returncode == 2 and "job 1001 of this experiment is queued or running" in done.stderr
    with (tmp_path / "experiments" / "tiny" / "jobs" / "job_001" / "chain").open("a") as chain:
        chain.write("1005.server\n")  # by 1001, which has ended
    programs(qstat='[ "$1" = 1005 ] || { echo "Unknown Job Id" >&2; exit 153; }; echo 1005.server tiny')
    done = pretrain(tmp_path, hf_folder, dataset_folder, "--executor", "pbs")
    assert done.returncode == 2 and "job 1005 of this experiment is queued or running" in done.stderr
    assert [path.name for path in (tmp_path / "experiments" / "tiny" / "jobs").glob("job_*")] == ["job_001"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--chain", "2"], ["--time_limit: missing"]),
        (["--chain", "2", "--requeue", "--time_limit", "1:00:00"], ["--chain or --requeue"]),
        (["--set", "launch.node_launcher=qrsh"], ["qrsh with pbs"]),
        (["--env", "HF_TOKEN=x"], ["--env", "HF_TOKEN", "written to files"]),
        (["--container_runtime", "apptainer", "-i", "gone.sif"], ["no image"]),
        (["-E", "13:00"], ["13:00/jobs/job_001: can't hold jobs", "no ':'"]),
        (["-E", "a,b", "--container_runtime", "apptainer", "-i", "library/ubuntu"], ["a,b: can't be mounted"]),
        (["--site", "tsubame"], ["no site file", "did you mean tsubame4?"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_can_not_be_had_is_told_before_anything_is_written(
    words: list[str],
    expected: list[str],
    programs: Callable[..., Path],
    tmp_path: Path,
    hf_folder: Path,
    dataset_folder: Path,
) -> None:
    heard = programs()
    done = pretrain(tmp_path, hf_folder, dataset_folder, "--executor", "pbs", *words)
    assert done.returncode == 2, done.stderr
    assert all(text in done.stderr for text in expected), done.stderr
    assert not heard.exists() and not any(tmp_path.glob("experiments/*/run.json"))


def test_a_tool_submits_itself_and_some_tasks_again(
    programs: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = programs()
    monkeypatch.chdir(tmp_path)
    tool = [sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py"), "--input", "a b.jsonl", "$x"]
    tool += ["--output-prefix", "out", "--tokenizer-model", "tok", "--executor", "sge"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*tool, *words], capture_output=True, text=True)

    assert "add --shard array" in run("--array", "0-3").stderr
    assert "--shard array/N" in run("--array", "2", "--shard", "array").stderr
    assert "without a scheduler" in run("--array", "2", "--executor", "local").stderr
    assert not heard.exists()
    programs(qsub='echo "qsub: no" >&2; exit 1')
    assert run("--array", "0-3%2", "--shard=array").returncode == 1
    assert not (tmp_path / "jobs").exists()  # nor the folders above the job's
    heard = programs()
    done = run("--array", "0-3%2", "--shard=array")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "jobs" / "preprocess_data" / "job_001"
    assert f"-t 1-4 -tc 2 {folder}/job.sge.sh" in heard.read_text()
    text = (folder / "run.sh").read_text()
    expected = (
        "tools/preprocess_data.py --input 'a b.jsonl' '$x' --output-prefix out --tokenizer-model tok --shard=array"
    )
    assert expected in text
    assert "--executor" not in text.splitlines()[-1] and "--array" not in text.splitlines()[-1]
    assert run("--array", "1,3", "--shard", "array/4").returncode == 0
    assert "-t 2-2" in heard.read_text() and "-t 4-4" in heard.read_text()
    records = [json.loads(line) for line in (folder.parent / "jobs.jsonl").read_text().splitlines()]
    assert [Path(record["logs"][0]).name[-6:] for record in records] == ["_0.log", "_1.log", "_3.log"]


IDS = {
    ("slurm", "17\n"): "17",
    ("slurm", "17;cluster\n"): "17",
    ("sge", "17\n"): "17",
    ("sge", "17.1-3:1\n"): "17",
    ("sge", 'Your job 17 ("a") has been submitted\n'): "17",
    ("sge", 'Your job-array 17.1-3:1 ("a") has been submitted\n'): "17",
    ("pbs", "17.server\n"): "17",
    ("pbs", "17[].server\n"): "17[]",
    ("pbs", "17\n"): "17",
}


@pytest.mark.parametrize(("executor", "said"), IDS)
def test_the_jobs_id_is_found_in_what_the_scheduler_says(executor: str, said: str) -> None:
    assert SCHEDULERS[executor].parse_job_id(said) == IDS[executor, said]
    assert SCHEDULERS[executor].parse_job_id(f"some notice of the site\n{said}") == IDS[executor, said]


def test_an_array_of_pbs_is_known_by_its_brackets_and_its_files_by_the_number(tmp_path: Path) -> None:
    job = submit.SubmittedJob.of("pbs", "17[]", tmp_path, (3, 4), "qsub x")
    assert [Path(log).name for log in job.logs] == ["pbs-17_3.log", "pbs-17_4.log"]
    assert [Path(file).name for file in job.exit_files] == ["exit-17_3", "exit-17_4"]
    assert job.cancel_command == "qdel '17[]'"


def test_what_pbs_recorded_about_a_jobs_end_is_read_in_one_piece() -> None:
    said = "Job Id: 4.server\n    comment = Job run at Mon Nov 30 at 10:57 on (n1:ncpus=2) and finishe\n\td\n"
    said += "    Exit_status = 271\n"
    found = SCHEDULERS["pbs"].end_reason("4", lambda words: said)
    assert found == "comment = Job run at Mon Nov 30 at 10:57 on (n1:ncpus=2) and finished; Exit_status = 271"


def test_whether_a_job_is_there_is_the_schedulers_word(programs: Callable[..., Path]) -> None:
    programs()
    assert not SCHEDULERS["pbs"].is_alive("1", run_here)
    assert not SCHEDULERS["slurm"].is_alive("1", run_here)
    programs(qstat="echo job", squeue="echo PENDING")
    assert SCHEDULERS["pbs"].is_alive("1", run_here) and SCHEDULERS["sge"].is_alive("1", run_here)
    assert SCHEDULERS["slurm"].is_alive("1", run_here)
    programs(qstat='echo "server is down" >&2; exit 1', squeue="echo COMPLETED")
    assert not SCHEDULERS["slurm"].is_alive("1", run_here)
    with pytest.raises(PretrainkitError, match="server is down"):
        SCHEDULERS["sge"].is_alive("1", run_here)
