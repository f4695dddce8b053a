"""What the pages tell people to type: our commands' flags and values, make targets, paths, and flags in prose."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex

import pytest
from doc_commands import options_of, own_command, problem_of, tools
from doc_pages import REPOSITORY, Command, commands, pages

PROGRAMS = {
    *("make", "python", "pip", "git", "cd", "export", "mkdir", "ls", "tail", "cat", "cp", "head", "source", "."),
    *("sbatch", "srun", "salloc", "squeue", "scancel", "sacct", "qsub", "qstat", "qdel", "qacct", "module", "ssh"),
    *("apptainer", "enroot", "docker", "podman", "hf", "wandb", "nvidia-smi", "df", "rsync", "pytest", "tar"),
}
"""What lines of a block that says it is shell may begin with, besides our own commands."""
OTHERS_FLAGS = {
    *("--array", "--wrap", "--requeue", "--signal", "--ntasks-per-node", "--time", "--exclusive"),  # Slurm
    *("--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-format", "--use-checkpoint-args"),  # Megatron-LM
    "--expert-tensor-parallel-size",  # Megatron-LM
    *("--nv", "--cleanenv", "--fakeroot", "--bind", "--sandbox", "--no-home"),  # Apptainer
    *("--ipc", "--shm-size"),  # Docker
    *("--no-deps", "--local-dir", "--help", "--verbose", "--quiet"),  # pip, hf, all of ours
    *("-l", "-g", "-P", "-pe", "-notify", "-inherit", "-m", "-k", "-c", "-e", "-n", "-t", "-J", "-A", "-q"),
}
READERS_FILES = {"configs/site/mycluster.yaml"}
"""Paths that a reader makes by following the page."""
TOP_LEVEL = ("configs", "containers", "docs", "pretraining", "scripts", "src", "tests", "tools", ".github", ".ci")
_FLAG = re.compile(r"(?<![\w-])(--?[a-zA-Z][\w-]*)")


def make_targets() -> set[str]:
    """The targets that the Makefile names as such."""
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())  # type: ignore[index]


def spans_with_commands() -> list[Command]:
    """Commands in the running text: those that begin with a command's path, or with the name of a tool."""
    names = {tool.rpartition("/")[2]: tool for tool in tools()}
    found = []
    for page in pages():
        for line, span in page.spans:
            first = span.split()[0].rpartition("/")[2] if span.split() else ""
            if (span.startswith(("tools/", "pretraining/", "scripts/", "containers/", "make ")) or first in names) and (
                len(span.split()) > 1
            ):
                words = shlex.split(span, comments=True)
                words[0] = names.get(first, words[0]) if "/" not in words[0] else words[0]
                # In running text only what matters is named: the rest is left out.
                found.append(Command(f"{page.name}:{line}", (*words, "..."), False))
    return found


def test_our_commands_are_taken_by_their_own_parsers() -> None:
    found = [(command, own_command(command.words)) for command in [*commands(), *spans_with_commands()]]
    ours = [(command, *own) for command, own in found if own]
    problems = [
        f"{command.where}: {shlex.join(command.words)}\n    {problem}"
        for command, script, words in ours
        if (problem := problem_of(script, words))
    ]
    assert len(ours) > 50
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("python tools/preprocess_data.py --input a --output-prefix b", "--tokenizer-model"),
        ("python tools/preprocess_data.py ... --append-eos", "--append-eos"),
        ("python tools/inspect_data.py sho ...", "invalid choice"),
        ("python pretraining/pretrain.py --executor lsf ...", "unknown value 'lsf'"),
        ("python pretraining/pretrain.py --site tsubame5 ...", "no site file"),
        ("python pretraining/pretrain.py --set optimizer.learning_rate=1 ...", "unknown field"),
        ("sbatch scripts/slurm/release.sbatch --bases MODEL", "--bases"),
        ("python tools/preprocess.py ...", "there is no"),
    ],
    ids=lambda text: text,
)
def test_a_command_that_would_fail_is_noticed(line: str, told: str) -> None:
    own = own_command(line.split())
    assert own is not None
    assert told in (problem_of(*own) or "")


def test_starts_from_trained_weights_have_a_learning_rate_for_them() -> None:
    found = [(command.where, command.words) for command in commands() if "pretraining/pretrain.py" in command.words]
    continuing = [each for each in found if "--nemo_model" in each[1] and "..." not in each[1]]
    assert len(continuing) > 10
    # Without --lr it is the one that suits random weights; the files of configs/run have their own.
    assert not [
        where for where, words in continuing if "--lr" not in words and not any("/run/" in word for word in words)
    ]


def test_make_targets_exist() -> None:
    named = [
        (command.where, word)
        for command in [*commands(), *spans_with_commands()]
        if command.words[0] == "make"
        for word in command.words[1:]
        if word != "..." and "=" not in word
    ]
    assert named
    assert not [where for where in named if where[1] not in make_targets()]


def test_lines_of_shell_blocks_are_commands() -> None:
    strange = [
        f"{command.where}: {command.words[0]}"
        for command in commands()
        if command.in_shell_block
        and command.words[0] not in PROGRAMS
        and not own_command(command.words[:1])
        and not command.words[0].startswith(".venv/bin/")
    ]
    assert not strange, "\n".join(strange)


def test_paths_that_are_named_exist() -> None:
    named = [(f"{page.name}:{line}", word) for page in pages() for line, span in page.spans for word in span.split()]
    named += [(command.where, word) for command in commands() for word in command.words]
    missing = []
    for where, word in named:
        word = word.strip("()'\",;:").partition("::")[0]
        top = word.partition("/")[0]
        is_pattern = re.search(r"[*?{}$<>%]|\.\.\.|[A-Z]{3,}|#", word.replace("README", ""))
        is_ours = "/" in word and top in TOP_LEVEL and word not in READERS_FILES
        if is_ours and not is_pattern and not (REPOSITORY / word).exists():
            missing.append(f"{where}: {word}")
    assert not missing, "\n".join(missing)


def test_modules_that_are_named_exist() -> None:
    spans = [(f"{page.name}:{line}", span) for page in pages() for line, span in page.spans]
    files = [(where, span) for where, span in spans if re.fullmatch(r"[a-z_]+(/[a-z_]+)+\.py", span)]
    folders = (REPOSITORY, REPOSITORY / "src/pretrainkit", REPOSITORY / "tests")
    missing = [each for each in files if not any((folder / each[1]).is_file() for folder in folders)]
    assert [span for _, span in missing] == ["mcore_bridge/patcher.py"], missing  # another project's
    names = [
        (where, *span.rpartition(".")[::2]) for where, span in spans if re.fullmatch(r"pretrainkit(\.\w+){2,}", span)
    ]
    assert names
    for where, module, name in names:
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), where


def test_flags_in_running_text_are_flags_of_some_command() -> None:
    known = frozenset().union(*(options_of(tool) for tool in tools()))
    others = [
        *REPOSITORY.glob("scripts/**/*.sh"),
        *REPOSITORY.glob("containers/*"),
        *REPOSITORY.glob("tests/bench/*.py"),
    ]
    texts = [path.read_text(encoding="utf-8") for path in others if path.is_file()]
    known |= {flag.replace("_", "-") for text in texts for flag in _FLAG.findall(text)}
    unknown = [
        f"{page.name}:{line}: {flag}"
        for page in pages()
        for line, span in page.spans
        if span.startswith("-") and "*" not in span
        for flag in _FLAG.findall(span)[:1]
        if flag.replace("_", "-") not in known and flag not in OTHERS_FLAGS
    ]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize(
    "block",
    [block for page in pages() for block in page.blocks if block.language == "python"],
    ids=lambda block: f"{block.page.name}:{block.line}",
)
def test_python_blocks_import_what_is_there(block) -> None:  # type: ignore[no-untyped-def]
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pretrainkit"):
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name), name.name
