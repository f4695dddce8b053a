"""What all commands share: the parser that accepts both spellings, and errors turned into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import os
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrainkit import logs
from pretrainkit.errors import EXIT_FAILED, PretrainkitError, RequestError, one_line
from pretrainkit.units import format_bytes

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
"""System errors that mean: no disk space, no quota, or no permission."""


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not None, False, empty texts and empty lists."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_none = action.default in (None, [], "") or action.default is False
        return action.help if has_none else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts `--max_steps` and `--max-steps` alike, and no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        spellings = {_spelling(option): option for option in self._option_string_actions}
        words = sys.argv[1:] if args is None else list(args)
        known: list[str] = []
        for position, word in enumerate(words):
            try:
                word.encode()
            except UnicodeEncodeError:  # no record could hold it, and not every terminal print it
                self.error(f"{word!a} is not UTF-8: rename the file, e.g. with convmv")
            if word == "--":
                known += words[position:]
                break
            name, equals, value = word.partition("=")
            is_option = name.startswith("--") and name not in self._option_string_actions
            known.append(spellings.get(_spelling(name), name) + equals + value if is_option else word)
        return super().parse_known_args(known, namespace)

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [self._closest_option(word.partition("=")[0]) for word in unknown if word.startswith("--")]
            hint = f"; did you mean {', '.join(found)}?" if (found := [flag for flag in flags if flag]) else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return arguments

    def _closest_option(self, flag: str) -> str | None:
        """An option that has the flag's words among its own, or is spelled almost like it."""
        name = _spelling(flag).removeprefix("--")
        options = [option for option in self._option_string_actions if option.startswith("--")]
        containing = [option for option in options if f"-{name}-" in f"{_spelling(option)}-"]
        close = difflib.get_close_matches(flag, options, n=1, cutoff=0.7)
        return min(containing, key=len) if containing else close[0] if close else None


def value_of(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that raises ValueError as the `type` of an argument, with its own words in the error."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _spelling(option: str) -> str:
    return option.replace("_", "-")


def run_command(command: Callable[[argparse.Namespace], int], parser: Parser, argv: Sequence[str] | None) -> int:
    """Parse, configure logging, run `command` and return its exit code; our own errors become a message."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        # It is inherited from a parent that ignores it, and would make every command that we run seem to succeed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if argv is None:
        _use_utf8()
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
        if not _stdout_is_closed():
            raise
        # The reader of our stdout (head, less) has exited; keep the interpreter from writing to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if isinstance(error, OSError) and (problem := _request_error_of(error)):
            print(f"{parser.prog}: error: {problem}", file=sys.stderr)
            return problem.exit_code
        if argv is not None:  # called by Python code, which wants the error itself
            raise
        traceback.print_exc()
        print(f"{parser.prog}: error: unexpected {one_line(error)} (its traceback is above)", file=sys.stderr)
        return EXIT_FAILED


def _request_error_of(error: OSError) -> RequestError | None:
    """What a system error means that only a wrong request or environment gives; None for others."""
    if error.errno == errno.ENAMETOOLONG:
        name = max(Path(os.fsdecode(error.filename or "")).parts, key=len, default="")
        return RequestError(
            f"{name[:60]}...: a name of {len(os.fsencode(name))} bytes",
            needed="less: most file systems take 255 bytes for a name and 4096 for a path",
            action="choose a shorter name",
        )
    if (error.strerror or "").startswith("No usable temporary directory"):
        return RequestError(error.strerror or "", action="set TMPDIR to a folder that can be written")
    return None


def _use_utf8() -> None:
    """Start this command again in Python's UTF-8 mode where the locale has another encoding.

    File names and texts are UTF-8 here. In an ASCII locale Python could not open the one nor print the other, and for
    child processes on compute nodes it is the same. From Python 3.15 on this mode is the default (PEP 686).
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _stdout_is_closed() -> bool:
    """Whether stdout is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


@contextlib.contextmanager
def translate_write_errors(experiment_dir: Path) -> Iterator[None]:
    """Turn a system error about disk space, permissions or the experiment's path itself into a PretrainkitError."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename or experiment_dir).absolute()  # a failed write names no file
        ours = (experiment_dir.absolute(), *experiment_dir.absolute().parents)
        if error.errno not in UNWRITABLE and (error.filename is None or path not in ours):
            raise
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        raise PretrainkitError(
            f"{error.strerror} ({format_bytes(shutil.disk_usage(existing).free)} are free)",
            action="free disk space, ask for more quota or permission, or use another --experiments_dir",
            where=str(path),
        ) from error
