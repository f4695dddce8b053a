"""Which part of the work is this process's, by the scheduler's job-array variables."""

from __future__ import annotations

from collections.abc import Mapping

from pretrainkit.errors import RequestError

_VARIABLES = {
    "SLURM_ARRAY_TASK_ID": ("SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP"),
    # It counts from 1, and outside an array the variable is 'undefined'.
    "SGE_TASK_ID": ("SGE_TASK_FIRST", "SGE_TASK_LAST", "SGE_TASK_STEPSIZE"),
    "PBS_ARRAY_INDEX": ("", "", ""),
    "PBS_ARRAYID": ("", "", ""),
}
"""Task's id -> first task, last task and step of its array; in Slurm, Grid Engine, PBS Pro and Torque."""
OWN_INDEX, OWN_COUNT = "PRETRAINKIT_ARRAY_INDEX", "PRETRAINKIT_ARRAY_COUNT"
"""Set in arrays that our --array submitted: counted from 0 in all schedulers, also where only some tasks run again."""
FORM = "I/N with 0 <= I < N, `array` in a Slurm or Grid Engine job array, or `array/N` in any"


def parse_shard(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Part I of N that a --shard value means: `I/N`, or `array[/N]` from the scheduler's variables.

    Array tasks are counted from their first one, so an array that reruns some tasks looks like a complete one: it is
    refused where N shows the difference, unless our --array submitted it. PBS doesn't give the number of tasks, so it
    needs `array/N`, with an array that begins with 0.
    Raises RequestError.
    """
    which, _, count_text = text.partition("/")
    try:
        count = int(count_text) if count_text else None
        index, found = (_task(environment, count)) if which == "array" else (int(which), count)
    except ValueError:
        raise RequestError(f"{text!r}", where="--shard", needed=FORM) from None
    if found is None:
        raise RequestError(
            f"task {index} of an array, but its scheduler doesn't give the number of tasks",
            where="--shard array",
            needed="the number of parts: --shard array/N, with an array that begins with 0",
        )
    if not 0 <= index < found:
        raise RequestError(f"{text!r} gives part {index} of {found}", where="--shard", needed=FORM)
    return index, found


def _task(environment: Mapping[str, str], count: int | None) -> tuple[int, int | None]:
    """Index of this task, counted from 0, and the number of tasks if it is known."""
    own = environment.get(OWN_INDEX, "")
    if own.isdigit():
        return int(own), count or int(environment[OWN_COUNT])
    for task_id, bounds in _VARIABLES.items():
        value = environment.get(task_id, "")
        if not value.isdigit():
            continue
        first_text, last, step_text = (environment.get(name) for name in bounds)
        first, step = int(first_text or 0), int(step_text or 1)
        found = (int(last) - first) // step + 1 if last else None
        if count and found and count != found:
            raise RequestError(
                f"{found} tasks in the array, {count} parts in all: which part is task {value}?",
                where=f"--shard array/{count}",
                needed=f"the part itself, counted from 0: --shard I/{count}",
            )
        return (int(value) - first) // step, count or found
    raise RequestError("no job array's variable is set", where="--shard array", needed=FORM)


def parse_shard_id(value: str | None, offset: int, environment: Mapping[str, str]) -> int:
    """The shard that --shard_id or the scheduler's array variable means.

    Slurm's and PBS's task ids are shard ids; Grid Engine's task 1 makes shard 0. `offset` is added to an array's id,
    for sets with more shards than the scheduler allows tasks.
    Raises RequestError when neither is given: no shard is made by default.
    """
    if value is not None:
        if not value.isdigit():
            raise RequestError(f"{value!r}", where="--shard_id", needed="a number, 0 or larger")
        return int(value)
    variables = (OWN_INDEX, *_VARIABLES)
    for name in variables:
        if (found := environment.get(name, "")).isdigit():
            return int(found) - (name == "SGE_TASK_ID") + offset
    raise RequestError(
        "no shard is given, and no job array's variable is set",
        where="--shard_id",
        needed=f"--shard_id N, --all, or one of {', '.join(variables)}",
    )
