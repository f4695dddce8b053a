"""Submits a tool's own command line as a job of a scheduler: --executor, --array and the flags of the job."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrainkit.cli import Parser
from pretrainkit.config.parser import add_flag, given_flags
from pretrainkit.config.schema import OPTIONS, RunConfig
from pretrainkit.errors import EXIT_DONE, RequestError

_FLAGS = (
    *("--executor", "--site", "--account", "--partition", "--cpus_per_task", "--time_limit"),
    *("--container_runtime", "--container_image", "--container_mounts", "--env"),
)
"""Flags of pretrain.py that a tool's job has too."""


def add_job_flags(parser: argparse.ArgumentParser, *, has_array: bool = False) -> None:
    """Add the flags that submit a tool's command line as a job; `has_array`: the tool can do one part of its work."""
    group = parser.add_argument_group("as a job of a scheduler")
    for option in OPTIONS.values():
        if option.flag in _FLAGS:
            add_flag(group, option, with_short=False)
    if has_array:
        group.add_argument(
            "--array",
            metavar="0-9",
            help="tasks of a job array, one for each part of the work; 3,7 reruns only those; %%4: at most 4 at once",
        )
    group.add_argument("--job_dir", type=Path, help="folder of jobs' scripts and logs (jobs/TOOL)")
    group.add_argument("--follow", action="store_true", help="show the job's log until it ends")
    group.add_argument("--dry_run", action="store_true", help="print the scripts, submit nothing")


def or_submit(
    run: Callable[[argparse.Namespace], int], script: str, argv: Sequence[str] | None
) -> Callable[[argparse.Namespace], int]:
    """A tool's command: `run`, or a submission of the command line if a flag asks for one."""

    def command(arguments: argparse.Namespace) -> int:
        given = given_flags(arguments)
        values = {name: getattr(arguments, name, None) for name in ("array", "follow", "dry_run")}
        asked = [f"--{name}" for name, value in values.items() if value not in (None, False)]
        if not given and not asked:
            return run(arguments)
        from pretrainkit.config.load import load_config
        from pretrainkit.config.validate import problems_of_launch

        config = load_config(flags=given)
        RequestError.raise_all(problems_of_launch(config))
        if config.launch.is_scheduled:
            words = _without_job_flags(sys.argv[1:] if argv is None else argv)
            return _submit(config, Path(script).resolve(), words, arguments)
        if asked:
            raise RequestError(
                f"{', '.join(asked)} without a scheduler", needed="--executor slurm, pbs or sge", where="--executor"
            )
        return run(arguments)

    return command


def _without_job_flags(words: Sequence[str]) -> list[str]:
    """A tool's words without the flags of `add_job_flags`."""
    parser = Parser(add_help=False)
    add_job_flags(parser, has_array=True)
    return parser.parse_known_args(list(words))[1]


def _submit(config: RunConfig, script: Path, words: list[str], arguments: argparse.Namespace) -> int:
    from pretrainkit.jobs import submit, watch
    from pretrainkit.jobs.job import parse_array
    from pretrainkit.jobs.run_job import new_job
    from pretrainkit.jobs.scripts import CODE
    from pretrainkit.run.source import describe_source

    array = None
    if getattr(arguments, "array", None) is not None:
        array = parse_array(arguments.array, parts_of(words))
        _check_parts(words, script.name, is_whole=array.indices == tuple(range(array.count)))
    folder = submit.next_folder((arguments.job_dir or Path("jobs") / script.stem).absolute())
    job = new_job(
        config.launch,
        folder=folder,
        words=[folder / CODE / script.parent.name / script.name, *words],
        needs=[folder, *paths_in(words)],
        on_gpu=False,
        name=script.stem,
        work_dir=Path.cwd(),
        time_limit=config.training.time_limit,
        array=array,
    )
    if arguments.dry_run:
        print(submit.describe(job))
        return EXIT_DONE
    submitted = submit.submit(job, script, describe_source([str(script), *words]))
    return watch.announce(submitted, config.launch, follows=arguments.follow)


def parts_of(words: Sequence[str]) -> int | None:
    """How many parts `--shard array/N` says there are; None where it says nothing."""
    for word in words:
        if match := re.fullmatch(r"(?:--shard=)?array/(\d+)", word):
            return int(match[1])
    return None


def _check_parts(words: Sequence[str], tool: str, *, is_whole: bool) -> None:
    """Refuse an array whose tasks would all do the same, or whose number of parts isn't known."""
    by_shard = any(word in ("array", "--shard=array") for word in words)
    if tool == "preprocess_data.py" and not by_shard and parts_of(words) is None:
        raise RequestError(
            "every task would do all of the work", action="add --shard array: one part for each task", where="--array"
        )
    if by_shard and not is_whole:
        raise RequestError(
            "these are some of the tasks, and the number of all tasks isn't given",
            action="add it: --shard array/N, with the N of the first submission",
            where="--array",
        )


def paths_in(words: Sequence[str]) -> list[Path]:
    """Folders that a command's words name, to be mounted: those that exist, or their nearest parent."""
    found = [Path.cwd()]
    for word in words:
        text = word.partition("=")[2] if word.startswith("--") else word
        if "/" not in text or "://" in text:
            continue
        path = Path(text).expanduser().absolute()
        while not path.exists():
            path = path.parent
        folder = path if path.is_dir() else path.parent
        if folder != Path(folder.anchor):
            found.append(folder)
    return list(dict.fromkeys(found))
