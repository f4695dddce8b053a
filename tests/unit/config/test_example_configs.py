"""Every run of configs/run and configs/baselines starts as its head says, and takes what configs/README.md says.

The command in a file's head is run with --dry_run, on the published shape of its model and two billion tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from indexed_writer import write_index
from published_models import CONFIGS, PARAMETERS, write_config

from pretrainkit.checkpoint.mapping import tensor_mappings
from pretrainkit.config.run_file import read_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.data.indexed.format import bin_path, idx_path
from pretrainkit.models.registry import read_shape
from pretrainkit.run import estimates
from pretrainkit.units import format_count

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "configs"
README = FOLDER / "README.md"
FILES = {path.stem: path for folder in ("run", "baselines") for path in (FOLDER / folder).glob("*.yaml")}
RUNS = sorted(FILES, key=lambda name: (FILES[name].parent.name != "run", name))
MODELS = sorted((FOLDER / "model").glob("*.yaml"))
NUM_DOCUMENTS, DOCUMENT_TOKENS = 2000, 1_000_000
TABLE_BEGINS, TABLE_ENDS = "<!-- estimates -->\n", "<!-- end of estimates -->\n"
HEAD = (
    "| run | TP x PP x DP | tokens a step | memory, GiB | recomputed | s a step | MFU | GPU-hours a billion tokens |\n"
    "|---|---|--:|--:|---|--:|--:|--:|\n"
)


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What a dry run left and printed."""

    run: ResolvedRun
    stdout: str


@pytest.fixture(scope="session")
def data_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of two billion zeros, which takes no room: the file has no blocks."""
    prefix = tmp_path_factory.mktemp("billions") / "text_document"
    lengths = np.full(NUM_DOCUMENTS, DOCUMENT_TOKENS, dtype=np.int32)
    write_index(idx_path(prefix), lengths.dtype, lengths)
    with bin_path(prefix).open("wb") as tokens:
        tokens.truncate(NUM_DOCUMENTS * DOCUMENT_TOKENS * 4)
    return prefix


@pytest.fixture(scope="session")
def dry_runs(tmp_path_factory: pytest.TempPathFactory, data_prefix: Path, tokenizer_folder: Path) -> dict[str, DryRun]:
    """A dry run of each file, by its name."""
    folder = tmp_path_factory.mktemp("dry_runs")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WANDB_API_KEY", "0" * 40)
        return {name: _dry_run(name, folder, data_prefix, tokenizer_folder) for name in RUNS}


def head_of(path: Path) -> str:
    """The comment at the top of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line.removeprefix("#") for line in lines[: next(n for n, x in enumerate(lines) if x[:1] != "#")])


def command_of(name: str) -> list[str]:
    """The words of the command in a run's head, after python."""
    joined = head_of(FILES[name]).replace("\\\n", " ")
    (line,) = (line for line in joined.splitlines() if line.strip().startswith("python pretraining/pretrain.py "))
    return shlex.split(line)[1:]


def _dry_run(name: str, folder: Path, data_prefix: Path, tokenizer_folder: Path) -> DryRun:
    words = command_of(name)
    model_file = REPOSITORY / words[words.index("--config") + 1]
    hub_name = yaml.safe_load(model_file.read_text(encoding="utf-8"))["hf_model_id"]
    model = write_config(hub_name, folder / hub_name.rpartition("/")[2])
    (model / "model.safetensors").touch()  # named, and read only by a start
    for file in tokenizer_folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (folder / "image.sif").touch()
    places = {"MODEL": model, "DATA": data_prefix, "IMAGE": folder / "image.sif"}
    words = [str(REPOSITORY / word if word.startswith("configs/") else places.get(word, word)) for word in words]
    words += ["--dry_run", "--hf_model_id", str(model), "--experiments_dir", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = pretrain().main(words[1:])
    assert code == 0, stderr.getvalue()
    experiment = yaml.safe_load(FILES[name].read_text(encoding="utf-8"))["experiment"]
    return DryRun(read_run(folder / experiment / "run.json"), stdout.getvalue())


@functools.cache
def pretrain() -> Any:
    """The command's module, from its path: seven starts of Python would take longer than all else here."""
    spec = importlib.util.spec_from_file_location("pretrain", REPOSITORY / "pretraining" / "pretrain.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_a_models_shape_has_the_published_parameters(model: Path, tmp_path: Path) -> None:
    hub_name = yaml.safe_load(model.read_text(encoding="utf-8"))["hf_model_id"]
    shape = read_shape(write_config(hub_name, tmp_path))
    assert sum(entry.numel for entry in tensor_mappings(shape)) == PARAMETERS[hub_name]
    line = next(line for line in README.read_text(encoding="utf-8").splitlines() if f" {hub_name}" in line)
    assert line.startswith(f"| `{model.stem}` |") and line.endswith(f"| {PARAMETERS[hub_name]:,} |")


def test_every_published_shape_is_used() -> None:
    assert {yaml.safe_load(path.read_text(encoding="utf-8"))["hf_model_id"] for path in MODELS} == set(CONFIGS)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_rendered_for_its_site(name: str, dry_runs: dict[str, DryRun]) -> None:
    done, words = dry_runs[name], command_of(name)
    config = done.run.config
    site = yaml.safe_load((FOLDER / "site" / f"{words[words.index('--site') + 1]}.yaml").read_text(encoding="utf-8"))
    assert config.launch.executor == site["executor"]
    rendered = {"local": "command ", "slurm": "#SBATCH ", "sge": "#$ ", "pbs": "#PBS "}[site["executor"]]
    assert rendered in done.stdout
    assert done.run.max_steps == (config.training.max_steps or one_epoch(done.run))
    assert done.run.initial_weights or "--nemo_model" not in words


def one_epoch(run: ResolvedRun) -> int:
    """Steps of 99% of the documents."""
    tokens = NUM_DOCUMENTS * DOCUMENT_TOKENS * 99 // 100
    return (tokens - 1) // run.config.data.sequence_length // run.config.training.global_batch_size


def test_the_runs_that_labs_asked_for_are_these(dry_runs: dict[str, DryRun]) -> None:
    eight, swallow = dry_runs["llama-3.1-8b"].run, dry_runs["llama-3.1-8b-swallow"].run
    training, parallel = eight.config.training, eight.config.parallel
    assert (training.global_batch_size, training.micro_batch_size) == (2048, 1)
    assert (parallel.tensor_model_parallel_size, eight.config.data.sequence_length) == (4, 8192)
    parallel = swallow.config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (1, 2)
    assert (swallow.precision, swallow.config.tracking.wandb_project) == ("bf16", "llm-cpt")
    assert dry_runs["smollm2-135m-cpu"].run.accelerator == "cpu"


def test_every_site_is_used() -> None:
    used = {words[words.index("--site") + 1] for words in map(command_of, RUNS)}
    assert used == {path.stem for path in (FOLDER / "site").glob("*.yaml")}


def row(name: str, run: ResolvedRun) -> str:
    """A line of the table of configs/README.md."""
    parallel, found, words = run.config.parallel, run.estimates, command_of(name)
    site = words[words.index("--site") + 1]
    tokens = run.config.training.global_batch_size * run.config.data.sequence_length
    spread = f"{parallel.tensor_model_parallel_size} x {parallel.pipeline_model_parallel_size} x "
    context = f" x CP {parallel.context_parallel_size}" if parallel.context_parallel_size > 1 else ""
    first = f"`{name}` | {spread}{run.data_parallel_size}{context}"
    if found is None:
        return f"| {first} on CPU, `{site}` | {format_count(tokens)} | - | - | - | - | - |\n"
    assert found.step_time_s and found.mfu and run.gpu_name and found.gpu_memory_gib and estimates.fits(run, found)
    hours = found.step_time_s * run.world_size / 3600 / tokens * 1e9
    layers = run.model.num_layers // parallel.pipeline_model_parallel_size
    count = run.recompute.num_layers
    again = f"{count} of {layers} layers" if run.recompute.granularity == "full" else "-"
    return (
        f"| {first} {run.gpu_name}, `{site}` | {format_count(tokens)} | {found.memory_gib:.0f} of "
        f"{found.gpu_memory_gib:.0f} | {again} | {found.step_time_s:.1f} | {found.mfu:.0%} | {hours:.1f} |\n"
    )


def test_the_readmes_table_is_what_the_estimates_say(dry_runs: dict[str, DryRun]) -> None:
    text = README.read_text(encoding="utf-8")
    table = HEAD + "".join(row(name, dry_runs[name].run) for name in RUNS)
    before, _, rest = text.partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    wanted = f"{before}{TABLE_BEGINS}\n{table}\n{TABLE_ENDS}{after}"
    if os.environ.get("UPDATE_GOLDEN"):
        README.write_text(wanted, encoding="utf-8")
        text = wanted
    assert text == wanted, "if the change is wanted: UPDATE_GOLDEN=1 pytest, then look at configs/README.md"
