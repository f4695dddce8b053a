"""What all commands share: the parser that takes both spellings, and errors turned into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pretrainkit import logs
from pretrainkit.errors import EXIT_FAILED, PretrainkitError
from pretrainkit.units import format_bytes

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
"""System errors that mean: no room or quota, or no permission."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes `--max_steps` and `--max-steps` alike, and no abbreviations.

    Help shows defaults and keeps line breaks out of nobody's way: one option, one line of meaning.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        spellings = {_spelling(option): option for option in self._option_string_actions}
        words = sys.argv[1:] if args is None else list(args)
        known: list[str] = []
        for position, word in enumerate(words):
            if word == "--":
                known += words[position:]
                break
            name, equals, value = word.partition("=")
            is_option = name.startswith("--") and name not in self._option_string_actions
            known.append(spellings.get(_spelling(name), name) + equals + value if is_option else word)
        return super().parse_known_args(known, namespace)


def _spelling(option: str) -> str:
    return option.replace("_", "-")


def run_command(command: Callable[[argparse.Namespace], int], parser: Parser, argv: Sequence[str] | None) -> int:
    """Parse, configure logging, run `command` and return its exit code; our own errors become a message."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        # A parent that ignores it hands that on, and then every command that we run seems to succeed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    arguments = parser.parse_args(argv)
    logs.configure(verbose=getattr(arguments, "verbose", False), quiet=getattr(arguments, "quiet", False))
    try:
        return command(arguments)
    except PretrainkitError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        # The reader of our stdout (head, less) has gone; keep the interpreter from writing to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _reader_has_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


@contextlib.contextmanager
def writing_told(experiment_dir: Path) -> Iterator[None]:
    """A system error that tells of no room or no permission, or that the folder can't be, becomes PretrainkitError."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename or experiment_dir).absolute()  # of a write no name is known
        if error.errno not in UNWRITABLE and place not in (
            experiment_dir.absolute(),
            *experiment_dir.absolute().parents,
        ):
            raise
        existing = next(folder for folder in (place, *place.parents) if folder.exists())
        raise PretrainkitError(
            f"{error.strerror} ({format_bytes(shutil.disk_usage(existing).free)} are free)",
            action="make room, ask for more quota or for permission, or take another --experiments_dir",
            where=str(place),
        ) from error
