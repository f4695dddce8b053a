"""What must hold on every scheduler; each file of tests runs these on one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

from scheduled import DEADLINE_S, Site, checkpoints, job_ids, logs, losses, outcome, records, wait_until

PRETRAIN = "pretraining/pretrain.py"


def two_jobs_at_once(site: Site, run_words: list[str], folder: Path, *words: object) -> list[tuple[list[str], str]]:
    """Two runs of two ranks each on one node, with a successor each that they don't need; ids and log of each."""
    common = [
        *run_words,
        "--experiments_dir",
        folder,
        "--max_steps",
        3,
        "--chain",
        2,
        "--time_limit",
        "00:30:00",
        *words,
    ]
    processes = [site.start(PRETRAIN, *common, "--experiment", name, "--follow") for name in ("a", "b")]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert losses(folder / "a") == losses(folder / "b")
    assert sorted(losses(folder / "a")) == [1, 2, 3]
    assert checkpoints(folder / "a") == ["step_00000003"]
    assert all("step 3/3" in stderr for _, stderr in outputs)
    shown = site.run("tools/inspect_run.py", folder / "a", with_site=False)
    assert shown.returncode == 0 and "attempt_1" in shown.stdout, shown
    for stdout, _ in outputs:
        wait_until(functools.partial(_is_gone, site, job_ids(stdout)[1]), "end of the chain of a run that is done")
    return [(job_ids(stdout), stderr) for stdout, stderr in outputs]


def chain(
    site: Site, run_words: list[str], folder: Path, cancel: str, *words: object, shorten: Callable[[str], object]
) -> None:
    """The time of the first of two jobs is over in the middle of its training: the second goes on from there.

    The second is cancelled while it trains. It has saved, and a start would go on from there. `shorten` may end the
    first job's time, once it trains.
    """
    experiment = folder / "chain"
    request = [*run_words, "--experiments_dir", folder, "--experiment", "chain", "--max_steps", 100000, *words]
    request += ["--set", "launch.check_nodes=false"]  # two_jobs_at_once has it on
    submitted = site.run(PRETRAIN, *request, "--chain", 2)
    assert submitted.returncode == 0, submitted.stderr
    first, second = job_ids(submitted.stdout)
    wait_until(lambda: len(losses(experiment)) >= 2, "second step")
    shorten(first)
    wait_until(lambda: outcome(experiment, 1), "end of the first job's time")
    assert outcome(experiment, 1)["exit_code"] == 85, logs(experiment)
    saved = int(checkpoints(experiment)[-1].removeprefix("step_"))
    wait_until(lambda: max(losses(experiment)) > saved, "step of the second job")
    starts = [record["step"] for record in records(experiment) if record.get("event") == "start"]
    assert starts == [0, saved]

    site.command(cancel, second)
    wait_until(lambda: records(experiment)[-1].get("event") == "stopped", "end")
    # A busy machine may be so slow to end the processes that the scheduler kills them first; all is saved by then.
    wait_until(lambda: outcome(experiment, 2) or not site.is_there(second), "end of the second job")
    assert outcome(experiment, 2).get("exit_code", 85) == 85, logs(experiment)
    last = int(checkpoints(experiment)[-1].removeprefix("step_"))
    planned = site.run(PRETRAIN, *request, "--plan", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert (plan["mode"], plan["step"], last > saved) == ("continue", last, True)


def queued_again(
    site: Site,
    run_words: list[str],
    folder: Path,
    by_itself: Callable[[str], object],
    by_the_scheduler: Callable[[str], object],
    cancel: str,
) -> None:
    """A run is started again: by its job, which was asked to save, by the scheduler, and no more once it is cancelled.

    Each start has a log and an exit code; --follow shows all of them. PBS continues a job by another.
    """
    experiment = folder / "again"
    job_folder = experiment / "jobs" / "job_001"
    request = [*run_words, "--experiments_dir", folder, "--experiment", "again", "--max_steps", 100000, "-G", 1]
    request += ["-P", 1, "--time_limit", "00:30:00", "--time_margin", "00:01:00", "--set", "launch.check_nodes=false"]
    follower = site.start(PRETRAIN, *request, "--requeue", "--follow")
    assert follower.stdout

    def stop(attempt: int, stop: Callable[[str], object], job: str) -> None:
        """Let an attempt train, then stop it."""
        earlier = max(losses(experiment), default=0)
        wait_until(lambda: max(losses(experiment), default=0) > earlier, f"step of attempt {attempt}")
        stop(job)
        wait_until(lambda: outcome(experiment, attempt), f"end of attempt {attempt}")
        assert outcome(experiment, attempt)["exit_code"] == 85, logs(experiment)

    first = last = follower.stdout.readline().split()[1]
    stop(1, by_itself, first)
    if site.executor == "pbs":
        wait_until(lambda: len((job_folder / "chain").read_text().splitlines()) == 2, "second job")
        last = (job_folder / "chain").read_text().splitlines()[1].partition(".")[0]
    refused = site.run(PRETRAIN, *request)
    assert refused.returncode == 2 and f"job {last} of this experiment" in refused.stderr
    stop(2, by_the_scheduler, last)
    stop(3, lambda job: site.command(cancel, job), last)
    stdout, stderr = follower.communicate(timeout=DEADLINE_S)
    assert follower.returncode == 85, stdout + stderr
    assert stderr.count("saved step") == 3 and not site.is_there(last), stderr

    starts = {(path.name.removeprefix("exit-"), int(path.read_text())) for path in job_folder.glob("exit-*")}
    again = [first, f"{last}.1", last] if last != first else [f"{last}.1", f"{last}.2", last]
    assert starts == {(name, 85) for name in again}
    for name in again:
        log = (job_folder / f"{site.executor}-{name}.log").read_text(encoding="utf-8")
        assert log.count("saved step") == 1, log
    shown = site.run("tools/inspect_run.py", experiment, with_site=False).stdout
    assert shown.count("exit code 85") >= 3 and f"{last}.1.log" in shown, shown


def array_with_a_failing_task(site: Site, tokenizer: Path, folder: Path) -> None:
    """Three tasks of which the second fails; run again alone, it completes the set and touches nothing else."""
    (folder / "text").mkdir()
    lines = [json.dumps({"text": f"document {number} " * 20}) for number in range(60)]
    for part in range(3):
        text = "\n".join(lines[20 * part : 20 * part + 20]) + "\n"
        (folder / "text" / f"part_{part}.jsonl").write_text(text if part != 1 else text + "{broken\n")
    prepared = folder / "prepared"
    command = [
        "tools/preprocess_data.py",
        "--input",
        folder / "text",
        "--output-prefix",
        prepared / "corpus",
        "--append-eod",
    ]
    command += ["--tokenizer-model", tokenizer, "--workers", 1, "--per-file", "--shard", "array/3", "--follow"]

    def indexes() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in prepared.glob("*.idx")}

    failed = site.run(*command, "--array", "0-2", cwd=folder)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "part_1.jsonl:21" in failed.stderr
    first = indexes()
    assert sorted(first) == ["corpus_part_0_text_document.idx", "corpus_part_2_text_document.idx"]

    (folder / "text" / "part_1.jsonl").write_text("\n".join(lines[20:40]) + "\n")
    mended = site.run(*command, "--array", "1", cwd=folder)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert len(indexes()) == 3 and first.items() <= indexes().items()
    verified = site.run("tools/inspect_data.py", "verify", prepared, with_site=False)
    assert verified.returncode == 0 and verified.stdout.count("20 documents") == 3, verified


def refused_job(site: Site, run_words: list[str], folder: Path, words: str) -> None:
    """A partition that isn't there: the scheduler's own words, exit code 1, and no job."""
    request = [*run_words, "--experiments_dir", folder, "--experiment", "refused", "--max_steps", 1]
    done = site.run(PRETRAIN, *request, "--partition", "nowhere")
    assert (done.returncode, job_ids(done.stdout)) == (1, []), done
    assert words in done.stderr
    assert not list((folder / "refused").glob("jobs/*"))


def _is_gone(site: Site, job_id: str) -> bool:
    return not site.is_there(job_id)


TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""


def evaluated(site: Site, run_words: list[str], folder: Path) -> None:
    """A training's job submits one that evaluates what it has saved."""
    (folder / "choices.jsonl").write_text('{"question": "a question", "choices": [" one", " another"]}\n' * 3)
    (folder / "choices.yaml").write_text(TASK)
    experiment = folder / "evaluated"
    request = [*run_words, "--experiments_dir", folder, "--experiment", "evaluated", "--max_steps", 2, "-G", 1, "-P", 1]
    request += ["--save_interval", 1, "--eval_tasks", folder / "choices.yaml", "--set", "launch.check_nodes=false"]
    done = site.run(PRETRAIN, *request, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr

    def evaluated_steps() -> set[int]:
        return {each["step"] for each in records(experiment) if each.get("event") == "evaluation"}

    try:
        wait_until(lambda: evaluated_steps() == {1, 2}, "evaluation")
    except AssertionError:
        raise AssertionError(
            "\n".join(path.read_text() for path in experiment.glob("jobs/*/evaluation/*.log"))
        ) from None
    assert not list((experiment / "evaluations").glob("*.due"))
