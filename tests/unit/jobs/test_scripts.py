"""Job scripts are as agreed for every site, and every word of a user gets through bash as it is."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.config.load import load_config
from pretrainkit.errors import RequestError
from pretrainkit.jobs import scripts, submit
from pretrainkit.jobs.container import Container
from pretrainkit.jobs.job import Evaluation, Job, parse_array

NASTY = [
    "a b",
    "it's",
    'say "x"',
    "$HOME ${x} $(id) `id`",
    "two\nlines",
    "日本語 한국어 é",
    "~/x",
    "*?[a]{b,c}",
    "\\back\\",
    "-n",
    "",
    "a;b&c|d>e<f#g!h%i",
]
PRINTER = """
import json, os, sys
names = [name for name in os.environ if name.startswith(("NASTY", "PRETRAINKIT_", "WANDB_API"))]
line = {"words": sys.argv[1:], "cwd": os.getcwd(), "umask": os.umask(0)}
line["environment"] = {name: os.environ[name] for name in names}
# Two nodes append to one log. print() writes an unbuffered line in two pieces, between which another's may get.
sys.stdout.write(json.dumps(line) + "\\n")
sys.exit(int(os.environ.get("EXIT_CODE", "0")))
"""
STUBS = {
    "scontrol": '[ "$1" = show ] && echo n1 || printf "%s\\n" "scontrol $*" >> "$STUB_LOG"',
    # The options before the command are srun's.
    "srun": 'while [ $# -gt 0 ] && [ "$1" != bash ] && [ "$1" != hostname ]; do shift; done\n'
    'if [ "$1" = hostname ]; then echo 127.0.0.1; else "$@" >> "$SRUN_LOG" 2>&1; fi',
    # Another node has a login shell's environment, and gets the command as one text for that shell.
    "ssh": 'while case "$1" in -o) shift 2 ;; *) false ;; esac; do :; done\n'
    'env -i PATH="$PATH" STUB_HOST="$1" bash -c "$2"',
    "qrsh": 'shift 2; env -i PATH="$PATH" "$@"',
    "pbsdsh": 'shift 3; env -i PATH="$PATH" "$@"',
    # What Apptainer does with the environment: --cleanenv leaves what APPTAINERENV_ names.
    "apptainer": 'if [ "$1" = pull ]; then printf "pull %s\\n" "$3" >> "$STUB_LOG"; : > "$2"; exit; fi\n'
    'printf "%s\\n" "$*" >> "$STUB_LOG"\n'
    'names=()\nfor name in $(compgen -e APPTAINERENV_); do names+=("${name#APPTAINERENV_}=${!name}"); done\n'
    'while [ "$1" != bash ]; do shift; done\nexec env -i PATH="$PATH" "${names[@]}" "$@"',
    "scancel": 'printf "scancel %s\\n" "$*" >> "$STUB_LOG"',
    "qdel": 'printf "qdel %s\\n" "$*" >> "$STUB_LOG"',
    "qsub": 'printf "qsub %s\\n" "$*" >> "$STUB_LOG"; echo 99.server',
}


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of schedulers, of which only what a script does with them matters; gives the file of what they heard."""
    for name, text in STUBS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "stub.log"))
    return tmp_path / "stub.log"


def a_job(folder: Path, executor: str, *words: str, nodes: int = 1, umask: int = 0o022, **settings: object) -> Job:
    """A job that prints its words, folder and variables."""
    (folder / "code").mkdir(parents=True)
    printer = folder / "print.py"
    printer.write_text(PRINTER)
    flags = {"launch.executor": executor, "launch.python": sys.executable} | settings
    return Job(
        name="job",
        folder=folder,
        work_dir=folder,
        command=(sys.executable, str(printer), *words),
        config=load_config(flags=flags).launch,
        container=None,
        num_nodes=nodes,
        time_limit="1-02:00:00",
        umask=umask,
    )


def written(job: Job, part: int = 0) -> Path:
    """The script of a job, written with what it starts."""
    for name, text in scripts.inner_scripts(job).items():
        (job.folder / name).write_text(text, encoding="utf-8")
    script = submit._parts(job)[part]
    (job.folder / script.name).write_text(script.text, encoding="utf-8")
    return job.folder / script.name


def environment_of(job: Job, **more: str) -> dict[str, str]:
    """What a scheduler would set."""
    executor = job.config.executor
    ids = {
        "slurm": {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"},
        "sge": {"JOB_ID": "7"},
        "pbs": {"PBS_JOBID": "7.s"},
    }
    log = {"SRUN_LOG": str(job.folder / "slurm-7.log")}
    return {**os.environ, **ids[executor], **log, **more}


def run_script(job: Job, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a job's script as its scheduler would."""
    return subprocess.run(
        ["bash", str(written(job))], env=environment_of(job, **more), capture_output=True, text=True, timeout=60
    )


def printed(job: Job, task: str = "") -> list[dict]:  # type: ignore[type-arg]
    text = (job.folder / f"{job.config.executor}-7{task}.log").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("executor", ["slurm", "sge", "pbs"])
def test_every_word_folder_and_variable_survives(executor: str, tmp_path: Path, stubs: Path) -> None:
    folder = tmp_path / "a b'c\"$HOME ~日本 /nemo_run" / "job_001"
    variables = {f"NASTY_{number}": word for number, word in enumerate(NASTY)}
    job = a_job(folder, executor, *NASTY, **{"launch.environment": variables})
    done = run_script(job)
    assert done.returncode == 0, done.stderr
    (line,) = printed(job)
    assert line["words"] == NASTY and line["cwd"] == os.path.normpath(folder)
    assert {name: line["environment"][name] for name in variables} == variables
    assert line["environment"]["PRETRAINKIT_JOB_ID"] == "7" and line["environment"]["PRETRAINKIT_NODE"] == "0"


@pytest.mark.parametrize("executor", ["slurm", "sge", "pbs"])
def test_a_group_can_read_what_a_job_writes_where_that_holds_for_its_submitter(
    executor: str, tmp_path: Path, stubs: Path
) -> None:
    job = a_job(tmp_path / "job", executor, umask=0o027)
    subprocess.run(["bash", str(written(job))], env=environment_of(job), check=True, umask=0o077, timeout=60)
    (line,) = printed(job)
    assert line["umask"] == 0o027
    assert (job.folder / "exit-7").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("executor", ["slurm", "sge", "pbs"])
@pytest.mark.parametrize("code", [0, 1, 85])
def test_the_exit_code_is_the_jobs_and_stands_in_a_file(executor: str, code: int, tmp_path: Path, stubs: Path) -> None:
    job = a_job(tmp_path / "job", executor, **{"launch.environment": {"EXIT_CODE": str(code)}})
    assert run_script(job).returncode == code
    assert (job.folder / "exit-7").read_text() == f"{code}\n"


@pytest.mark.parametrize(("launcher", "executor"), [("ssh", "pbs"), ("pbsdsh", "pbs"), ("ssh", "sge"), ("qrsh", "sge")])
def test_every_node_is_started_once_and_knows_the_job(
    launcher: str, executor: str, tmp_path: Path, stubs: Path
) -> None:
    job = a_job(
        tmp_path / "a job",
        executor,
        *NASTY,
        nodes=2,
        **{"launch.node_launcher": launcher, "launch.environment": {"NASTY": "\n".join(NASTY)}},
    )
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\nn2\n" if executor == "pbs" else "n1 2 all.q@n1 U\nn2 2 all.q@n2 U\n")
    done = run_script(job, PBS_NODEFILE=str(nodes), PE_HOSTFILE=str(nodes))
    assert done.returncode == 0, done.stderr
    lines = sorted(printed(job), key=lambda line: line["environment"]["PRETRAINKIT_NODE"])
    assert [line["environment"]["PRETRAINKIT_NODE"] for line in lines] == ["0", "1"]
    for name in ("PRETRAINKIT_START", "PRETRAINKIT_JOB_ID", "PRETRAINKIT_LOG", "NASTY"):
        assert lines[0]["environment"][name] == lines[1]["environment"][name]
    assert all(line["words"] == NASTY for line in lines)


@pytest.mark.parametrize("executor", ["slurm", "sge", "pbs"])
def test_in_a_container_the_job_has_its_variables_and_nothing_else_of_the_host(
    executor: str, tmp_path: Path, stubs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job(tmp_path / "a job", executor, *NASTY, **{"launch.environment": {"NASTY": "\n".join(NASTY)}})
    mount = f"{tmp_path}/a job:/x y"
    job = dataclasses.replace(job, container=Container("apptainer", "/images/a b.sif", (mount,), nv=True))
    monkeypatch.setenv("PYTHONPATH", "/host/packages")
    monkeypatch.setenv("NASTY_HOST", "host")
    done = run_script(job, CUDA_VISIBLE_DEVICES="2,3")
    assert done.returncode == 0, done.stderr
    (line,) = printed(job)
    assert line["words"] == NASTY and line["environment"]["NASTY"] == "\n".join(NASTY)
    assert "NASTY_HOST" not in line["environment"] and line["environment"]["PRETRAINKIT_JOB_ID"] == "7"
    assert stubs.read_text().splitlines() == [
        f"exec --cleanenv --no-home --nv --bind {tmp_path}/a job:/x y /images/a b.sif bash {job.folder}/run.sh"
    ]
    text = (job.folder / "run.sh").read_text()
    assert "PYTHONNOUSERSITE=1" in text and f"PYTHONPATH='{job.folder}/code/src'" in text


def test_an_image_of_a_registry_is_fetched_once(tmp_path: Path, stubs: Path) -> None:
    job = a_job(tmp_path / "job", "sge", **{"launch.cache_dir": str(tmp_path / "cache")})
    job = dataclasses.replace(job, container=Container("apptainer", "docker://nvcr.io/a/b:1", (), nv=False))
    for _ in range(2):
        assert run_script(job).returncode == 0
    assert [line for line in stubs.read_text().splitlines() if line.startswith("pull")] == [
        "pull docker://nvcr.io/a/b:1"
    ]
    environment = printed(job)[0]["environment"]
    assert (tmp_path / "cache").is_dir() and environment["PRETRAINKIT_NODE"] == "0"


@pytest.mark.parametrize("executor", ["sge", "pbs"])
def test_too_few_nodes_are_refused(executor: str, tmp_path: Path, stubs: Path) -> None:
    job = a_job(tmp_path / "job", executor, nodes=3)
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn2\n")
    assert run_script(job, PBS_NODEFILE=str(nodes), PE_HOSTFILE=str(nodes)).returncode == 2
    assert "the job has 2 nodes (n1 n2), needed: 3" in (job.folder / f"{executor}-7.log").read_text()


@pytest.mark.parametrize("executor", ["slurm", "sge", "pbs"])
def test_a_finished_or_failing_run_ends_its_chain_and_a_saved_one_does_not(
    executor: str, tmp_path: Path, stubs: Path
) -> None:
    cancel = "scancel" if executor == "slurm" else "qdel"
    for code, heard in ((0, [f"{cancel} 8", f"{cancel} 9"]), (3, [f"{cancel} 8", f"{cancel} 9"]), (85, [])):
        job = a_job(
            tmp_path / str(code),
            executor,
            **{"launch.chain": 4, "launch.environment": {"EXIT_CODE": str(code)}},
        )
        (job.folder / "chain").write_text("6\n7\n8\n9\n")
        assert run_script(job).returncode == code
        assert (stubs.read_text().splitlines() if stubs.exists() else []) == heard
        stubs.unlink(missing_ok=True)


@pytest.mark.parametrize("executor", ["slurm", "sge", "pbs"])
def test_a_run_that_hung_is_started_again_by_its_chain_or_by_a_requeue(
    executor: str, tmp_path: Path, stubs: Path
) -> None:
    hang = "import os, sys\nfrom pathlib import Path\n"
    hang += "start = Path(FOLDER, 'nodes', os.environ['PRETRAINKIT_START'])\n"
    hang += "start.mkdir(parents=True, exist_ok=True)\n(start / 'hung').touch()\nprint('{}')\nsys.exit(1)\n"
    for name, settings in (("chain", {"launch.chain": 4}), ("requeue", {"launch.requeue": True})):
        job = a_job(tmp_path / name, executor, **settings)
        (job.folder / "print.py").write_text(hang.replace("FOLDER", repr(str(job.folder))))
        (job.folder / "chain").write_text("6\n7\n8\n9\n")
        restarts = name == "requeue"
        assert run_script(job).returncode == (99 if restarts and executor == "sge" else 1)
        heard = stubs.read_text() if stubs.exists() else ""
        assert ("requeue" in heard or "qsub" in heard) == (restarts and executor != "sge")
        assert "scancel" not in heard and "qdel" not in heard
        in_place = restarts and executor != "pbs"
        assert (job.folder / ("exit-7.1" if in_place else "exit-7")).read_text() == "1\n"
        assert (job.folder / f"{executor}-7.log").exists() != in_place  # one log for each start
        stubs.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("executor", "code", "heard"),
    [("slurm", 85, "scontrol requeue 7"), ("sge", 99, ""), ("pbs", 85, "qsub -v PRETRAINKIT_CONTINUES=1")],
)
def test_a_run_whose_time_is_over_is_queued_again(
    executor: str, code: int, heard: str, tmp_path: Path, stubs: Path
) -> None:
    settings = {"launch.requeue": True, "launch.environment": {"EXIT_CODE": "85"}}
    job = a_job(tmp_path / "job", executor, **settings)
    assert run_script(job).returncode == code
    assert heard in (stubs.read_text() if stubs.exists() else "")
    if executor == "pbs":
        assert (job.folder / "chain").read_text() == "99.server\n"
        assert "-W depend=afterany:7.s" in stubs.read_text()
    stubs.unlink(missing_ok=True)
    job = a_job(tmp_path / "failing", executor, **{**settings, "launch.environment": {"EXIT_CODE": "1"}})
    assert run_script(job).returncode == 1 and not stubs.exists()


WAITER = """import glob, sys, time
print("{}", flush=True)
while not glob.glob(sys.path[0] + "/nodes/*/stop"):
    time.sleep(0.05)
time.sleep(0.3)
print("saved", flush=True)
sys.exit(85)
"""
"""Saves and ends when the job's other files say so."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
@pytest.mark.parametrize("time_limit", ["01:00:00", "00:01:00"], ids=["early", "at its end"])
def test_a_job_of_pbs_that_was_cancelled_is_not_queued_again(
    number: int, time_limit: str, tmp_path: Path, stubs: Path
) -> None:
    job = a_job(tmp_path / "job", "pbs", **{"launch.requeue": True})
    job = dataclasses.replace(job, time_limit=time_limit)
    (job.folder / "print.py").write_text(WAITER)
    assert signalled(job, number, os.kill) == 85
    is_cancelled = number == signal.SIGTERM and time_limit == "01:00:00"
    assert stubs.exists() == (not is_cancelled) == (job.folder / "chain").exists()


@pytest.mark.parametrize("executor", ["sge", "pbs"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_schedulers_signal_reaches_the_nodes_by_a_file_and_the_script_waits(
    executor: str, number: int, tmp_path: Path, stubs: Path
) -> None:
    job = a_job(tmp_path / "job", executor)
    (job.folder / "print.py").write_text(WAITER)
    # Grid Engine signals the whole process group; TERM is PBS's, to the script.
    assert signalled(job, number, os.killpg if number != signal.SIGTERM else os.kill) == 85
    assert "saved" in (job.folder / f"{executor}-7.log").read_text()


def test_the_login_shell_of_pbs_becomes_the_script_that_it_is_given(tmp_path: Path, stubs: Path) -> None:
    job = a_job(tmp_path / "job", "pbs")
    script = written(job).rename(job.folder / "8[0].server.SC")
    assert f"#PBS -S {job.folder}/{scripts.SHELL}\n" in submit.describe(job)
    script.write_text(f"echo $$ > {tmp_path}/pid\n")
    process = subprocess.Popen(["bash", job.folder / scripts.SHELL], stdin=subprocess.PIPE, text=True)
    process.communicate(f"{job.folder}/8\\[0\\].server.SC\n", timeout=30)
    assert (tmp_path / "pid").read_text() == f"{process.pid}\n"
    assert "#PBS -S /bin/bash\n" in submit.describe(a_job(tmp_path / "a b", "pbs"))  # qsub takes no such path


def signalled(job: Job, number: int, send: Callable[[int, int], None]) -> int:
    """The exit code of a job's script that gets a signal after its command has printed '{}'."""
    process = subprocess.Popen(["bash", str(written(job))], env=environment_of(job), start_new_session=True)
    log, end_s = job.folder / f"{job.config.executor}-7.log", time.monotonic() + 30
    while not (log.exists() and "{}" in log.read_text()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    send(process.pid, number)
    return process.wait(timeout=30)


def test_tasks_of_arrays_count_from_0_in_every_scheduler(tmp_path: Path, stubs: Path) -> None:
    ids = {
        "slurm": {
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "3",
            "SRUN_LOG": str(tmp_path / "slurm/slurm-7_3.log"),
        },
        "sge": {"SGE_TASK_ID": "4"},
        "pbs": {"PBS_JOBID": "7[3].server", "PBS_ARRAY_INDEX": "3"},
    }
    for executor, variables in ids.items():
        job = dataclasses.replace(a_job(tmp_path / executor, executor), array=parse_array("0-4", None))
        assert run_script(job, **variables).returncode == 0
        (line,) = printed(job, "_3")
        assert line["environment"]["PRETRAINKIT_ARRAY_INDEX"] == "3"
        assert line["environment"]["PRETRAINKIT_ARRAY_COUNT"] == "5"
        assert (job.folder / "exit-7_3").exists()


def test_some_tasks_again_are_as_few_submissions_as_the_scheduler_can_take(tmp_path: Path) -> None:
    def commands(executor: str) -> list[str]:
        job = dataclasses.replace(a_job(tmp_path / executor, executor), array=parse_array("3,7-8", 10))
        text = submit.describe(job)
        return [line.replace(str(job.folder), "J") for line in text.partition("# submitted by\n")[2].splitlines()]

    assert commands("slurm") == ["sbatch --requeue --parsable J/job.slurm.sh"]
    assert [line.partition(" -t ")[2] for line in commands("sge")] == ["4-4 J/job.sge.sh", "8-9 J/job.sge.sh"]
    single, several = commands("pbs")
    assert single.endswith(" J/job.task_3.pbs.sh") and "-J" not in single and several.endswith("-J 7-8 J/job.pbs.sh")


def test_a_variable_that_bash_can_not_have_is_refused(tmp_path: Path) -> None:
    job = a_job(tmp_path / "job", "sge", **{"launch.environment": {"a-b": "x"}})
    with pytest.raises(RequestError, match="--env: 'a-b'"):
        submit.describe(job)


def site_job(site: str, folder: Path, **settings: object) -> Job:
    flags = {
        "launch.site": site,
        "launch.account": "mygroup",
        "launch.num_nodes": 2,
        "launch.cache_dir": "/group/cache",
        "launch.python": "/venv/bin/python",
        **settings,
    }
    config = load_config(flags=flags)
    launch = config.launch
    mounts = ("/group/data:/group/data", "/runs/exp:/runs/exp")
    runtime = {"slurm": "pyxis", "abci": ""}.get(site, "apptainer")
    image = {"slurm": "/images/nemo.sqsh", "slurm-apptainer": "docker://nvcr.io/nvidia/nemo:25.09"}
    return Job(
        name="exp",
        folder=folder,
        work_dir=Path("/runs/exp"),
        command=("/venv/bin/python", "-m", "pretrainkit.launch.node", "--", "train.py", "--run", "/runs/exp/run.json"),
        config=launch,
        container=Container(runtime, image.get(site, "/images/nemo.sif"), mounts, nv=True) if runtime else None,
        environment={"HF_HUB_OFFLINE": "1"},
        on_gpu=True,
        num_nodes=launch.num_nodes,
        ranks_per_node=launch.num_gpus,
        time_limit=config.training.time_limit,
        warning_s=600,
        secrets=folder / "secrets.sh",
    )


SITES = {
    "slurm": {"launch.chain": 2},
    "slurm-apptainer": {"launch.requeue": True, "launch.num_nodes": 1},
    "tsubame4": {"launch.chain": 3},
    "abci": {"launch.requeue": True},
}


@pytest.mark.parametrize("site", SITES)
def test_the_scripts_of_a_site_are_as_agreed(
    site: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "me")
    job = site_job(site, Path("/runs/exp/jobs/job_001"), **SITES[site])
    golden(f"job_{site}.txt", submit.describe(job))


@pytest.mark.parametrize("site", ["slurm", "tsubame4", "abci"])
def test_the_scripts_of_an_array_on_cpus_are_as_agreed(
    site: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "me")
    job = site_job(site, Path("/group/jobs/preprocess_data/job_001"), **{"launch.num_nodes": 1})
    job = dataclasses.replace(
        job,
        name="preprocess_data",
        on_gpu=False,
        container=None,
        command=("/venv/bin/python", "preprocess_data.py", "--shard", "array/10", "--append-eod"),
        array=parse_array("0-4,9%2", 10),
        secrets=None,
        warning_s=None,
    )
    golden(f"array_{site}.txt", submit.describe(job))


@pytest.mark.parametrize("site", SITES)
def test_the_scripts_of_a_site_are_good_bash(site: str, tmp_path: Path) -> None:
    job = site_job(site, tmp_path, **SITES[site])
    for part in submit._parts(job):
        (tmp_path / part.name).write_text(part.text)
    for name, text in scripts.inner_scripts(job).items():
        (tmp_path / name).write_text(text)
    for path in tmp_path.glob("*.sh"):
        subprocess.run(["bash", "-n", str(path)], check=True)
        check = [
            str(Path(sys.executable).with_name("shellcheck")),
            "--exclude=SC1090,SC1091,SC2317,SC2154,SC2034,SC2329",
            str(path),
        ]
        done = subprocess.run(check, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("executor", ["slurm", "sge", "pbs"])
def test_a_job_submits_one_that_evaluates_what_is_due_as_no_part_of_itself(
    executor: str, tmp_path: Path, stubs: Path
) -> None:
    job = a_job(tmp_path / "a job", executor, **{"launch.environment": {"EXIT_CODE": "85"}})
    marks, nested = tmp_path / "marks of it", a_job(tmp_path / "a job" / "evaluation", executor)
    job = dataclasses.replace(job, evaluation=Evaluation(marks, nested))
    assert run_script(job).returncode == 85 and not stubs.exists(), "nothing is due"
    marks.mkdir()
    (job.folder / "print.py").write_text(
        f"from pathlib import Path\nfor step in (1, 2):\n    Path({str(marks)!r}, f'step_{{step}}.due').touch()\n"
    )
    submit_command = "sbatch" if executor == "slurm" else "qsub"
    heard = 'printf "%s\\n" "$*" "${!SLURM_*} ${!PRETRAINKIT_*}" >> "$STUB_LOG"; echo 8'
    (tmp_path / "bin" / submit_command).write_text(f"#!/bin/bash\n{heard}\n")
    (tmp_path / "bin" / submit_command).chmod(0o755)
    assert run_script(job, SLURM_CONF="/etc/slurm.conf").returncode == 0
    assert sorted(path.name for path in marks.iterdir()) == ["step_1.submitted", "step_2.submitted"]
    words, variables = stubs.read_text().splitlines()
    assert words.endswith(f"{nested.folder}/job.{executor}.sh") and variables.split() == ["SLURM_CONF"]
    assert str(nested.folder) in submit.describe(job), "--dry_run shows it"
