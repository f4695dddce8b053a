"""The quickstart's commands for a CPU, taken from the page and typed one after the other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from doc_pages import REPOSITORY, commands, read_page

PAGE = "docs/quickstart.md"


def commands_between(first_heading: str, next_heading: str) -> list[tuple[str, ...]]:
    """The page's commands between two headings."""
    lines = {text: line for line, text in read_page(REPOSITORY / PAGE).headings}
    ours = [command for command in commands() if command.where.startswith(f"{PAGE}:")]
    between = range(lines[first_heading], lines[next_heading])
    return [command.words for command in ours if int(command.where.rpartition(":")[2]) in between]


@pytest.mark.integration
def test_the_quickstart_on_a_cpu_leads_to_a_release(
    tmp_path: Path, make_hf_llama: Callable[..., Path], jsonl_file: Path
) -> None:
    for name in ("tools", "pretraining"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    shutil.copytree(make_hf_llama(), tmp_path / "my_model")
    shutil.copy(jsonl_file, tmp_path / "my_text.jsonl")
    checkpoints = tmp_path / "experiments/my_run/checkpoints"
    said = []
    for program, script, *words in commands_between("On a CPU", "On GPUs"):
        if program != "python":  # the last one publishes
            continue
        # To save time: a start without its comparison, of the second one what it would do, of the gate all but models.
        if script == "pretraining/pretrain.py":
            words += ["--plan"] if checkpoints.is_dir() else ["--start_parity", "off"]
        if script == "tools/verify_release.py":
            words.append("--files-only")
        command = [sys.executable, script, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{script} {words}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout + done.stderr)
    expected = ["40 records in = 40 documents out", "--- document 0", "training:", "from trained weights"]
    expected += [
        "saved step 20",
        "step       20 of 30 done",
        "20 of 20",
        "-> released (hf)",
        "Release check: passed",
    ]
    assert len(said) == len(expected)
    assert [words for words, text in zip(expected, said, strict=True) if words not in text] == []
    assert (tmp_path / "released.verified.md").is_file()
