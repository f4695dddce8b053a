"""Statements of fact in the pages and in --help: numbers, lists and exit codes are those of the code."""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace

import pytest
from doc_commands import module_of, options_of, tools, with_subcommands
from doc_pages import REPOSITORY

from pretrainkit.config.schema import OPTIONS
from pretrainkit.data import dataset, decontamination
from pretrainkit.data.indexed import format as indexed_format
from pretrainkit.data.indexed import labels
from pretrainkit.data.packed import once, request
from pretrainkit.data.readers import records, source
from pretrainkit.data.shards import format, mirror
from pretrainkit.data.tokens import parity
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING, EXIT_WRONG_REQUEST
from pretrainkit.jobs import rendezvous, secrets
from pretrainkit.launch import hang_watch, job_node, local, supervise
from pretrainkit.models.registry import FAMILIES
from pretrainkit.preflight import node, software
from pretrainkit.run import progress, trackers
from pretrainkit.signals import STOP_SIGNALS

SIGNALS = sorted(each.name for each in STOP_SIGNALS)
WORDS = {3: "three", 4: "four", 5: "five", 8: "eight"}


def constants(file: str) -> SimpleNamespace:
    """The constants of a module that is not imported here, since it imports torch or Megatron-core: seconds."""
    tree = ast.parse((REPOSITORY / "src/pretrainkit" / file).read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    names = [(node.targets[0], node.value) for node in assigned if isinstance(node.value, ast.Constant | ast.Dict)]
    return SimpleNamespace(**{ast.unparse(target): ast.literal_eval(value) for target, value in names})


initial_loss_check = constants("engine/callbacks/initial_loss_check.py")
loss_guard = constants("engine/callbacks/loss_guard.py")
models, prompts = constants("release/models.py"), constants("release/prompts.py")
BOUNDS = initial_loss_check.BOUNDS
SMALL, NORMAL, LARGE = sorted(request.SIZES, key=lambda size: size[1])


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:g} GiB"


def number(value: float) -> str:
    """`1e-4`, `0.15`, `2`."""
    return f"{value:.0e}".replace("e-0", "e-") if value < 0.01 else f"{value:g}"


FACTS = (
    ("docs/data.md", f"on {len(parity.hard_strings([])):,} fixed hard strings, with"),
    (
        "docs/data.md",
        f"with {WORDS[len(parity.hard_strings(['<a>'])) - len(parity.hard_strings([]))]} more for each of its first "
        f"{parity.MAX_SPECIAL_TOKENS} special tokens, and on text from {WORDS[parity.SAMPLE_PLACES]} places",
    ),
    ("docs/data.md", f"fewer than {indexed_format.UINT16_CARDINALITY:,} ids"),
    ("docs/data.md", f"{decontamination.NUM_WORDS} words in a row"),
    ("docs/data.md", f"(a string of 1 to {records.MAX_LABEL} characters)"),
    ("docs/data.md", f"more than {labels.MAX_LABELS:,} different labels"),
    ("docs/data.md", f"Of more than {labels.MAX_FILES} inputs"),
    ("docs/data.md", f"one EOD ({dataset._EOD_DOCUMENTS} are looked at)"),
    ("docs/data.md", f"pieces of {source.BLOCK_BYTES >> 20} MiB"),
    ("docs/shards.md", f"log a line every {once.LINE_EVERY_S:g} s"),
    ("docs/shards.md", f"after {once.SILENCE_S:g} s of silence"),
    ("docs/shards.md", f"once a file system, {WORDS[mirror.AT_ONCE]} at a time"),
    (
        "docs/shards.md",
        f"small, normal ({NORMAL[1]} cores, {gib(NORMAL[2])}), large ({LARGE[1]} cores, {gib(LARGE[2])}) machine",
    ),
    ("docs/shards.md", f"{SMALL[3]}, {NORMAL[3]}, {LARGE[3]} sequences assembled at once"),
    ("docs/shards.md", f"{SMALL[4]}, {NORMAL[4]}, {LARGE[4]} sequences in a record batch"),
    ("docs/shards.md", f"({format.SAMPLE.itemsize} bytes a sample: offset, bytes, tokens, CRC-32)"),
    ("docs/conversion.md", f"{number(models.LOGIT_TOLERANCE)} plus {number(models.LOGIT_TOLERANCE_RELATIVE)} of the"),
    ("docs/conversion.md", f"held-out loss of both, equal to {number(models.LOSS_TOLERANCE)}"),
    ("docs/conversion.md", f"It has {prompts.SEQUENCE_TOKENS} tokens, or {prompts.PAST_BOUNDARY} more than the last"),
    ("docs/conversion.md", f"takes at most {prompts.LONG_TOKENS:,} tokens"),
    ("docs/conversion.md", f"the loss of each of up to {initial_loss_check.MAX_TOKENS} tokens"),
    (
        "docs/conversion.md",
        f"| fp32 | {number(BOUNDS['fp32']['root_mean_square'])} | {number(BOUNDS['fp32']['largest'])} |",
    ),
    (
        "docs/conversion.md",
        "| bf16, against fp32 with the same bf16 weights | "
        f"{number(BOUNDS['bf16']['root_mean_square'])} | {number(BOUNDS['bf16']['largest'])} |",
    ),
    (
        "docs/pretrain.md",
        f"a second Ctrl-C, {'a second' if local._SECOND_CTRL_C_S == 1 else '?'} or more after the first, or "
        f"{supervise.GRACE_S // 60} minutes without an end",
    ),
    ("docs/launch.md", f"silent for {WORDS[rendezvous.DEAD_AFTER_S // 60]} minutes"),
    ("docs/launch.md", f"so do {WORDS[job_node.MAX_IDLE_JOBS]} jobs in a row"),
    ("docs/nodes.md", f"takes less than {node.MIN_WRITE_RATE >> 20} MiB/s"),
    ("docs/nodes.md", f"differs by over {node.MAX_CLOCK_SKEW_S:g} s"),
    ("docs/nodes.md", f"under {gib(node.MIN_SHARED_MEMORY)} of shared memory"),
    ("docs/nodes.md", f"under {node.ENOUGH_OPEN_FILES} open files"),
    ("docs/nodes.md", f"has {node.SCHEDULER_TIMEOUT_S:g} s to answer"),
    ("docs/nodes.md", f"a home with under {software.MIN_HOME_BYTES / 1e9:g} GB free"),
    ("docs/resume.md", f"a phase of a start gets {'an hour' if progress.START_LIMIT_S == 3600 else '?'}"),
    ("docs/resume.md", f"{hang_watch._LATE_S:g} seconds after the last step"),
    ("docs/resume.md", f"ends the run after {loss_guard.MAX_SKIPPED_IN_A_ROW} in a row"),
    ("docs/resume.md", f"the mean of the last {loss_guard.WINDOW_STEPS} steps"),
    ("docs/resume.md", f"The first {loss_guard.MIN_STEPS} steps after a start"),
    ("docs/resume.md", f"answer within {trackers.CONNECT_TIMEOUT_S} s at the start"),
    (
        "README.md",
        f"Exit codes: {EXIT_DONE} done, {EXIT_FAILED} failed, {EXIT_WRONG_REQUEST} invalid request (nothing was "
        f"started), {EXIT_STOPPED_AFTER_SAVING} stopped",
    ),
    (
        "docs/data.md",
        f"Exit codes: {EXIT_DONE} done and written; {EXIT_FAILED} failed; {EXIT_WRONG_REQUEST} wrong request, before "
        f"any work; {EXIT_STOPPED_AFTER_SAVING} stopped by a signal",
    ),
)


def text_of(page: str) -> str:
    """A page with every white space as one blank."""
    return " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("page", "statement"), FACTS, ids=[statement for _, statement in FACTS])
def test_a_statement_is_that_of_the_code(page: str, statement: str) -> None:
    assert statement in text_of(page)


def test_every_family_is_in_the_table() -> None:
    rows = re.findall(
        r"^\| (\w+) \| (\w+ForCausalLM) \|", (REPOSITORY / "docs/conversion.md").read_text(), re.MULTILINE
    )
    assert sorted(rows) == sorted((family.name, *family.architectures) for family in FAMILIES)


def test_the_tools_that_run_as_jobs_are_those_that_are_named() -> None:
    found = re.search(
        r"## Tools as jobs (.*?) take `--executor`,(.*?), and (.*?) also `--array`", text_of("docs/launch.md")
    )
    assert found
    named, flags, with_array = re.findall(r"`(\w+\.py)`", found[1]), re.findall(r"`(--\w+)`", found[2]), found[3]
    names = {tool.rpartition("/")[2]: options_of(tool) for tool in tools() if tool.startswith("tools/")}
    assert set(named) == {name for name, options in names.items() if "--executor" in options}
    assert all(flag.replace("_", "-") in names[name] for name in named for flag in flags)
    assert {name for name, options in names.items() if "--array" in options} == set(
        re.findall(r"`(\w+\.py)`", with_array)
    )
    # What the quickstarts say of commands with --site.
    assert {tool for tool in tools() if "--site" in options_of(tool)} == {
        tool for tool in tools() if "--dry-run" in options_of(tool) and tool != "tools/publish_release.py"
    }


def test_variables_that_reach_a_job_are_those_that_are_named() -> None:
    found = re.search(r"those of yours that begin with (.*?)\.", text_of("docs/launch.md"))
    prefixes = re.fullmatch(r"\((.*)\)_", secrets._PASSED_ON.pattern)
    assert found and prefixes
    assert {name.strip("`_") for name in re.findall(r"`\w+`", found[1])} == set(prefixes[1].split("|"))


@pytest.mark.parametrize("page", ["docs/pretrain.md", "docs/resume.md"])
def test_signals_that_stop_a_run_are_those_that_are_named(page: str) -> None:
    row = next(line for line in (REPOSITORY / page).read_text(encoding="utf-8").splitlines() if "SIGXCPU" in line)
    assert sorted({*re.findall(r"SIG[A-Z0-9]+", row), *(["SIGINT"] if "Ctrl-C" in row else [])}) == SIGNALS
    assert row.rstrip(" |").endswith(f"{EXIT_STOPPED_AFTER_SAVING}")


def test_the_translated_table_of_flags_has_their_defaults() -> None:
    row = r"^\| (?:`(-\w)`, )?`(--\w+)` \| ([^|]+) \|"
    rows = re.findall(row, (REPOSITORY / "docs/README.zh-TW.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 10
    by_flag = {option.flag: option for option in OPTIONS.values()}
    for short, flag, default in rows:
        option = by_flag[flag]
        words = {"必填": option.required, "無": option.default is None, "一個 epoch": "one epoch" in option.unset}
        assert words.get(default, default.strip("`") == str(option.default)) and (option.short or "") == short, flag


@pytest.mark.parametrize("tool", tools())
def test_help_names_a_default_once_and_none_that_is_empty(tool: str) -> None:
    parsers = with_subcommands(module_of(tool).build_parser())
    text = " ".join(" ".join(parser.format_help() for parser in parsers).split())
    assert not re.findall(r"\(default: (?:None|\[\])?\)|\(default: [^)]*\) \(default", text)
