"""Which part of the work is this process's, in a scheduler's job array."""

from __future__ import annotations

from collections.abc import Mapping

from pretrainkit.errors import RequestError

ARRAYS = (
    # id, first, last, step
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP"),
    ("SGE_TASK_ID", "SGE_TASK_FIRST", "SGE_TASK_LAST", "SGE_TASK_STEPSIZE"),
    ("PBS_ARRAY_INDEX", "", "", ""),
    ("PBS_ARRAYID", "", "", ""),
)
"""Slurm, Grid Engine, PBS Pro, Torque. Outside an array Grid Engine sets its variable to 'undefined'."""
FORM = "I/N with 0 <= I < N, `array` in a Slurm or Grid Engine job array, or `array/N` in any"


def parse_shard(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Part I of N that a --shard value means: `I/N`, or `array[/N]` from the scheduler's variables.

    Array tasks are counted from their first one, so an array that runs some tasks again can't be told from a whole
    one: it is refused where N shows it, unless it was submitted with our --array. PBS doesn't tell how many there
    are, so it needs `array/N`, with an array that begins with 0.
    Raises RequestError.
    """
    which, _, count_text = text.partition("/")
    try:
        count = int(count_text) if count_text else None
        index, found = (_array(environment, count)) if which == "array" else (int(which), count)
    except ValueError:
        raise RequestError(f"{text!r}", where="--shard", needed=FORM) from None
    if found is None:
        raise RequestError(
            f"task {index} of an array, but its scheduler doesn't tell how many tasks there are",
            where="--shard array",
            needed="the number of parts: --shard array/N, with an array that begins with 0",
        )
    if not 0 <= index < found:
        raise RequestError(f"{text!r} gives part {index} of {found}", where="--shard", needed=FORM)
    return index, found


def _array(environment: Mapping[str, str], count: int | None) -> tuple[int, int | None]:
    own = environment.get("PRETRAINKIT_ARRAY_INDEX", "")
    if own.isdigit():  # a job of ours: counted from 0 in all schedulers, also where only some tasks run again
        return int(own), count or int(environment["PRETRAINKIT_ARRAY_COUNT"])
    for id_name, first_name, last_name, step_name in ARRAYS:
        value = environment.get(id_name, "")
        if not value.isdigit():
            continue
        first = int(environment.get(first_name) or 0)
        step = int(environment.get(step_name) or 1)
        last = environment.get(last_name)
        found = (int(last) - first) // step + 1 if last else None
        if count and found and count != found:
            raise RequestError(
                f"{found} tasks in the array, {count} parts in all: which part is task {value}?",
                where=f"--shard array/{count}",
                needed=f"the part itself, counted from 0: --shard I/{count}",
            )
        return (int(value) - first) // step, count or found
    raise RequestError("no job array's variable is set", where="--shard array", needed=FORM)
