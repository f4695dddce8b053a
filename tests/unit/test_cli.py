"""What every command does alike: spellings, exit codes, messages."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pretrainkit.cli import Parser, run_command, value_of
from pretrainkit.errors import CheckpointError, DataError, PretrainkitError, RequestError
from pretrainkit.units import parse_bytes

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="tool.py")
    parser.add_argument("--max_steps", "-s", type=int, default=3, help="steps")
    parser.add_argument("--append-eod", action="store_true")
    parser.add_argument("rest", nargs="*")
    return parser


@pytest.mark.parametrize(
    "words",
    [["--max_steps", "5"], ["--max-steps", "5"], ["--max_steps=5"], ["--max-steps=5"], ["-s", "5"], ["-s5"]],
    ids=" ".join,
)
def test_both_spellings_and_both_forms_are_taken(parser: Parser, words: list[str]) -> None:
    assert parser.parse_args(words).max_steps == 5


@pytest.mark.parametrize("word", ["--append-eod", "--append_eod"])
def test_a_flag_without_a_value_has_both_spellings(parser: Parser, word: str) -> None:
    assert parser.parse_args([word]).append_eod


def test_arguments_that_are_not_utf8_are_refused(parser: Parser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parser.parse_args(["--max_steps", "a\udce9.jsonl"])
    assert refused.value.code == 2
    assert r"'a\udce9.jsonl' is not UTF-8" in capsys.readouterr().err


def test_values_keep_their_spelling(parser: Parser) -> None:
    arguments = parser.parse_args(["--max-steps=5", "--", "a_b-c", "--max-steps", "--append_eod"])
    assert arguments.rest == ["a_b-c", "--max-steps", "--append_eod"]


@pytest.mark.parametrize("word", ["--max", "--max-step", "--append"])
def test_abbreviations_are_refused(parser: Parser, word: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args([word, "5"])
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (RequestError("wrong"), 2),
        (DataError("damaged"), 1),
        (CheckpointError("incomplete"), 1),
        (PretrainkitError("failed"), 1),
        (KeyboardInterrupt(), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_become_exit_codes_and_one_message(
    parser: Parser, error: BaseException, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(arguments: argparse.Namespace) -> int:
        raise error

    assert run_command(command, parser, []) == exit_code
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("tool.py: ")
    assert str(error) in output.err and "Traceback" not in output.err


def test_a_machine_without_a_temporary_folder_gets_a_message(
    parser: Parser, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    assert run_command(lambda _: len(tempfile.gettempdir()), parser, []) == 2
    assert "tool.py: error: No usable temporary directory found" in (error := capsys.readouterr().err)
    assert "set TMPDIR" in error


def test_our_own_bugs_keep_their_traceback(parser: Parser) -> None:
    def command(arguments: argparse.Namespace) -> int:
        raise AssertionError("a bug")

    with pytest.raises(AssertionError):
        run_command(command, parser, [])


def test_the_commands_exit_code_is_passed_on(parser: Parser) -> None:
    assert run_command(lambda arguments: 85, parser, []) == 85


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = (
        "import sys\nfrom pretrainkit.cli import Parser, run_command\n"
        "def command(arguments):\n    for number in range(100000): print(number)\n    return 0\n"
        "sys.exit(run_command(command, Parser(), []))\n"
    )
    done = subprocess.run(f"{sys.executable} -c '{code}' | head -1", shell=True, capture_output=True, text=True)
    assert done.stdout == "0\n" and done.stderr == ""


def test_failures_of_commands_are_seen_under_a_parent_that_ignores_its_children() -> None:
    program = (
        "import signal, subprocess, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from pretrainkit.cli import Parser, run_command\n"
        "sys.exit(run_command(lambda _: subprocess.run(['false']).returncode, Parser(), []))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1


def test_a_connection_that_broke_is_not_taken_for_a_reader_that_has_gone() -> None:
    script = (
        "from pretrainkit.cli import Parser, run_command\n"
        "def command(arguments): raise BrokenPipeError('of a connection')\n"
        "run_command(command, Parser(prog='tool'), [])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "BrokenPipeError: of a connection" in done.stderr


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--warmup_steps", "--lr_warmup_steps"),
        ("--warmup-steps=3", "--lr_warmup_steps"),
        ("--lr_scheduler", "--lr_schedule"),
        ("--nonsense", None),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], flag: str, meant: str | None
) -> None:
    parser = Parser()
    for name in ("--lr", "--lr_warmup_steps", "--lr_schedule", "--max_steps"):
        parser.add_argument(name)
    with pytest.raises(SystemExit):
        parser.parse_args(["--lr", "3", flag])
    error = capsys.readouterr().err.rstrip()
    assert error.endswith(f"{flag}; did you mean {meant}?" if meant else f"unrecognized arguments: {flag}")


def test_a_wrong_value_is_answered_in_the_words_of_what_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    parser.add_argument("--size", type=value_of(parse_bytes))
    assert parser.parse_args(["--size", "5GB"]).size == 5_000_000_000
    with pytest.raises(SystemExit):
        parser.parse_args(["--size", "3X"])
    assert "argument --size: '3X' is no size like 5GB or 500MiB" in capsys.readouterr().err


def test_an_unexpected_error_ends_with_our_words_below_its_traceback() -> None:
    program = "from pretrainkit.cli import Parser, run_command\n"
    program += "def fail(_): raise KeyError('a name')\n"
    program += "raise SystemExit(run_command(fail, Parser(prog='tool.py'), None))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[0].startswith("Traceback")
    assert lines[-1] == "tool.py: error: unexpected KeyError: 'a name' (its traceback is above)"


@pytest.mark.parametrize("tool", ["inspect_run.py", "merge_checkpoints.py --last 2"])
def test_a_name_that_no_file_system_takes_is_a_wrong_request(tool: str, tmp_path: Path) -> None:
    script, *words = tool.split()
    paths = [str(tmp_path / ("n" * 300)), str(tmp_path / "target")]
    done = run_tool(script, *words, *paths[: 1 + bool(words)], environment={})
    assert done.returncode == 2 and "a name of 300 bytes" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_names_are_utf8_in_any_locale(tmp_path: Path) -> None:
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_tool("inspect_run.py", str(tmp_path / "日本"), environment=ascii_locale)
    assert done.returncode == 2 and "日本: no metrics.jsonl" in done.stderr, done.stderr


def run_tool(script: str, *words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "tools" / script), *words]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env={**os.environ, **environment})


def test_what_a_verbose_command_starts_is_verbose() -> None:
    inner = "from pretrainkit import logs; logs.configure(); logs.get_logger('pretrainkit.a').debug('seen')"
    outer = "import subprocess, sys; from pretrainkit import logs; logs.configure(verbose=len(sys.argv) > 1)\n"
    outer += f"subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    for flags in ([], ["-v"]):
        done = subprocess.run([sys.executable, "-c", outer, *flags], capture_output=True, text=True, check=True)
        assert ("DEBUG seen" in done.stderr) == bool(flags)
