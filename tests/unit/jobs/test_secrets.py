"""Tokens leave the command line and every text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrainkit.jobs.secrets import split_token
from pretrainkit.logs import masked

TOKEN = "hf_very_secret_0123456789"


@pytest.mark.parametrize(
    ("words", "kept", "token"),
    [
        ([], [], None),
        (["-g", "4"], ["-g", "4"], None),
        (["-g", "4", "--hf_token", TOKEN, "-m", "1"], ["-g", "4", "-m", "1"], TOKEN),
        (["--hf-token", TOKEN], [], TOKEN),
        ([f"--hf_token={TOKEN}", "-g", "4"], ["-g", "4"], TOKEN),
        ([f"--hf-token={TOKEN}=="], [], f"{TOKEN}=="),
        (["--hf_token", "first", f"--hf_token={TOKEN}"], [], TOKEN),
        (["--hf_token"], ["--hf_token"], None),
        (["--", "--hf_token", TOKEN], ["--", "--hf_token", TOKEN], None),
    ],
)
def test_the_token_is_taken_out_in_every_spelling(words: list[str], kept: list[str], token: str | None) -> None:
    assert split_token(words) == (kept, token)


def test_texts_are_masked() -> None:
    environment = {"HF_TOKEN": TOKEN, "WANDB_API_KEY": "w" * 40, "OTHER": "plain"}
    assert masked(f"a {TOKEN} {'w' * 40} plain", environment) == "a *** *** plain"
    assert masked("nothing", {"HF_TOKEN": ""}) == "nothing"


def test_the_process_list_shows_no_token_and_the_environment_has_it(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from pretrainkit.jobs.secrets import hide_token_from_process_list\n"
        "hide_token_from_process_list()\n"
        "print(Path('/proc/self/cmdline').read_bytes().split(bytes(1)))\n"
        "print(sys.flags.no_user_site, sys.argv[1:], os.environ['HF_TOKEN'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-s", str(script), "a b", "--hf_token", TOKEN, "-g", "4"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_TOKEN": "another"},
        check=True,
    )
    command_line, rest = done.stdout.splitlines()
    assert TOKEN not in command_line and "a b" in command_line
    assert rest == f"1 ['a b', '-g', '4'] {TOKEN}"
