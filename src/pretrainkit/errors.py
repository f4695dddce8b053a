"""The errors a user can cause and fix; each carries the exit code of its command.

A message has up to four parts: where (file:line, flag or field), what was found, what is needed,
what to do next. `assert` is for our own bugs, these are for everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_REQUEST = 2
EXIT_STOPPED_AFTER_SAVING = 85


class PretrainkitError(Exception):
    """Valid work that failed."""

    exit_code = EXIT_FAILED

    def __init__(self, found: str, *, needed: str = "", action: str = "", where: str = "") -> None:
        self.where, self.found, self.needed, self.action = where, found, needed, action
        parts = [f"{where}: {found}" if where else found]
        if needed:
            parts.append(f"Needed: {needed}")
        if action:
            parts.append(f"What to do: {action}")
        super().__init__("\n  ".join(parts))


class RequestError(PretrainkitError):
    """An invalid request; raised before any work starts or file is written."""

    exit_code = EXIT_WRONG_REQUEST

    @classmethod
    def raise_all(cls, problems: list[RequestError]) -> None:
        """Raise the problems, if there are any: several as one error, so that a user can fix them in one go."""
        if len(problems) == 1:
            raise problems[0]
        if problems:
            raise cls(f"{len(problems)} problems:\n" + "\n".join(f"- {problem}" for problem in problems))

    @staticmethod
    @contextmanager
    def collected(problems: list[RequestError]) -> Iterator[None]:
        """Add a RequestError that ends the block to `problems`, and go on."""
        try:
            yield
        except RequestError as problem:
            problems.append(problem)


class StoppedError(PretrainkitError):
    """A signal ended the work; what is finished is kept, and the same command continues."""

    exit_code = EXIT_STOPPED_AFTER_SAVING


class DataError(PretrainkitError):
    """Input data, or a prepared dataset, that is damaged or not what it claims to be."""


class CheckpointError(PretrainkitError):
    """A checkpoint that is incomplete, damaged or contradicts what it is used for."""


def one_line(error: BaseException) -> str:
    """An error as one line that isn't too long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]


@contextmanager
def machine_errors(where: Path, action: str, kind: type[PretrainkitError] = DataError) -> Iterator[None]:
    """Turn an error of the system, such as a full disk, into one of `kind`; `where` is named if it names no file."""
    try:
        yield
    except OSError as error:
        raise kind(error.strerror or str(error), where=str(error.filename or where), action=action) from error
