"""From a request to a started run: gather, check, resolve, write, start; --dry_run and --plan stop earlier."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.config.resolve import RunFacts, ValidationFacts, resolve, warnings_of
from pretrainkit.config.schema import ResolvedRun, RunConfig
from pretrainkit.config.validate import problems_of
from pretrainkit.data.dataset import read_dataset
from pretrainkit.data.hub import local_folder
from pretrainkit.data.tokens.tokenizer import load_tokenizer
from pretrainkit.errors import EXIT_DONE, RequestError
from pretrainkit.evaluation.tasks import check_tasks
from pretrainkit.jobs.container import Container, container_of
from pretrainkit.jobs.run_job import needs_of, planned_job, start_job
from pretrainkit.jobs.submit import describe as describe_job
from pretrainkit.launch.evaluations import fetch_tasks
from pretrainkit.launch.local import LaunchPlan, run_attempt
from pretrainkit.launch.supervise import GRACE_S
from pretrainkit.logs import get_logger
from pretrainkit.machine import read_machine
from pretrainkit.models.registry import shape_of
from pretrainkit.models.rope_change import trained_config
from pretrainkit.run import branch, initial_weights
from pretrainkit.run.folder import LAUNCHER_LOCK, SOURCE_FILE, RunFolder, locked, wait_for_ranks
from pretrainkit.run.identity import changes_since_last_start, write_run_file
from pretrainkit.run.lr_schedule import describe_schedule
from pretrainkit.run.resource_plan import finalize_run, plan_memory
from pretrainkit.run.resume_plan import MODES, plan_start
from pretrainkit.run.source import describe
from pretrainkit.signals import count_time_from_here
from pretrainkit.units import format_count, format_duration

log = get_logger(__name__)


def resolve_request(config: RunConfig) -> ResolvedRun:
    """The resolved run of a request. Raises RequestError with everything that is wrong with it."""
    facts, problems = inspect_inputs(config)
    if config.training.eval_tasks and config.launch.runtime == "none":
        with RequestError.collected(problems):
            check_tasks(config.training.eval_tasks)
    RequestError.raise_all([*problems, *problems_of(config, facts)])
    run = resolve(config, facts)
    for warning in warnings_of(run, facts):
        log.warning("%s", warning)
    return run


def inspect_inputs(config: RunConfig) -> tuple[RunFacts, list[RequestError]]:
    """The facts of a request, and the problems of the inputs they should come from.

    A fact that can't be read is None, so that all other checks still run.
    """
    experiments_dir = Path(config.experiments_dir).expanduser().resolve()
    facts = RunFacts(
        machine=read_machine(config.launch.accelerator), experiment_dir=str(experiments_dir / config.experiment)
    )
    problems: list[RequestError] = []
    for read in (_model, _dataset, _validation_sets, _weights, _branch):
        with RequestError.collected(problems):
            facts = dataclasses.replace(facts, **read(config, facts))
    return facts, problems


def _model(config: RunConfig, _: RunFacts) -> dict[str, Any]:
    if not config.hf_model_id:
        return {}
    folder = local_folder(config.hf_model_id)
    tokenizer = load_tokenizer(folder)
    shape = shape_of(trained_config(folder, config), str(folder / "config.json"))
    facts = {"tokenizer_sha256": tokenizer.sha256, "tokenizer_largest_id": tokenizer.largest_id}
    return {"model": shape, "hf_folder": str(folder), **facts}


def _dataset(config: RunConfig, _: RunFacts) -> dict[str, Any]:
    if not config.data.dataset_path:
        return {}
    found = read_dataset(config.data.dataset_path, config.data.split, config.data.blend_schedule)
    return {
        "dataset": found.facts,
        "split_tokens": found.split_tokens,
        "dataset_tokenizers": found.tokenizers,
        "without_eod": found.without_eod,
    }


def _validation_sets(config: RunConfig, _: RunFacts) -> dict[str, Any]:
    sets = []
    for name, path in config.data.valid_path.items():
        try:
            found = read_dataset(path, "1,0,0")
        except RequestError as error:
            where = path if error.where in ("", "--dataset_path") else error.where
            raise RequestError(
                error.found, needed=error.needed, action=error.action, where=f"--valid_path {name}: {where}"
            ) from None
        tokens = tuple(split[0] for split in found.split_tokens or ())
        sets.append(ValidationFacts(name, found.facts, tokens, found.tokenizers))
    return {"validation_sets": tuple(sets)}


def _weights(config: RunConfig, facts: RunFacts) -> dict[str, Any]:
    if config.nemo_model is None:
        return {}
    folder = RunFolder(Path(facts.experiment_dir))
    recorded = initial_weights.of_resumed_run(config.nemo_model, folder)
    hf_folder = Path(facts.hf_folder) if facts.hf_folder else None
    try:
        located = initial_weights.locate(config.nemo_model, folder.path.parent, hf_folder=hf_folder)
    except RequestError as problem:
        if recorded is None:
            raise
        log.warning("%s: the run started from it, and continues from its own checkpoint without it", problem.found)
        return {"initial_weights": recorded}
    if facts.model:
        initial_weights.check_shape(located, facts.model, config)
    is_same = recorded is not None and recorded.source == located.source
    return {"initial_weights": recorded if is_same else located}


def _branch(config: RunConfig, facts: RunFacts) -> dict[str, Any]:
    return {"branch": branch.locate(config.branch_from, RunFolder(Path(facts.experiment_dir)))}


def start(config: RunConfig, *, train_script: Path, command_line: Sequence[str], follow: bool = False) -> int:
    """Start the run that is asked for, or continue it; gives the exit code.

    On this machine it waits for the end, and the exit code is that of the ranks. A scheduler's job is submitted, and
    waited for with `follow`. What the ranks would raise for the run and its checkpoints is raised before anything is
    written.
    """
    run = resolve_request(config)
    if (plan := plan_start(run)).is_done:
        changes_since_last_start(run)
        log.info("nothing to do: %s. More steps need a larger --max_steps", plan.progress)
        return EXIT_DONE
    if config.training.eval_tasks and plan.is_first and config.launch.runtime == "none":
        fetch_tasks(config.training.eval_tasks)
    if config.launch.is_scheduled:
        return start_job(run, train_script=train_script, command_line=command_line, follow=follow)
    count_time_from_here()
    folder, container = RunFolder.of(run), _container(run, train_script)
    with locked(folder, LAUNCHER_LOCK):
        wait_for_ranks(folder, longest_s=GRACE_S)
        run = finalize_run(run)
        initial_weights.provide_for(run)
        run_file = write_run_file(run)
        branch.link_checkpoint(run)
        files.write_text(folder.path / SOURCE_FILE, describe(run, command_line))
        log_dir = folder.new_attempt_folder(run_file, folder.path / SOURCE_FILE)
        log.info("experiment %s, logs in %s", config.experiment, log_dir)
        return run_attempt(LaunchPlan(run, run_file, log_dir, train_script.resolve(), container))


def dry_run(config: RunConfig, *, train_script: Path) -> int:
    """Do everything but the conversion and the start: print the run, its file, and the command or scripts."""
    run = resolve_request(config)
    folder = RunFolder.of(run)
    job = planned_job(run, train_script.resolve()) if config.launch.is_scheduled else None
    container = None if job else _container(run, train_script)
    with locked(folder, LAUNCHER_LOCK):
        run = finalize_run(run)
        run_file = write_run_file(run, is_dry=True)
    print(summarize(run))
    print(f"run file   {run_file}")
    if job is not None:
        print(f"\n{describe_job(job)}")
        return EXIT_DONE
    plan = LaunchPlan(run, run_file, folder.attempt("N"), train_script.resolve(), container)
    print(f"command    {shlex.join(plan.node_command)}")
    return EXIT_DONE


def print_plan(config: RunConfig, *, as_json: bool) -> int:
    """Print what a start would do, change and need. It is refused as the start would be."""
    run = plan_memory(resolve_request(config), refuse=False)
    plan, changes = plan_start(run), changes_since_last_start(run)
    if as_json:
        found = {
            "schedule": describe_schedule(run),
            "changes": changes,
            "estimates": run.estimates,
            "kernels": run.kernels,
        }
        print(json.dumps({**dataclasses.asdict(plan), **found}, indent=2, default=dataclasses.asdict))
    else:
        print(plan.describe())
        print(f"schedule   {describe_schedule(run)}")
        print("\n".join(f"changed    {name}: {old} -> {new}" for name, (old, new) in changes.items()) or "changed    -")
        print(summarize_estimates(run))
    finalize_run(run)
    return EXIT_DONE


def _container(run: ResolvedRun, train_script: Path) -> Container | None:
    """The container of a local run. Raises RequestError for what it can't have."""
    needs = [train_script.resolve().parents[1], *needs_of(run)]
    return container_of(run.config.launch, needs=needs, on_gpu=run.accelerator == "gpu")


def summarize(run: ResolvedRun) -> str:
    """The run as aligned lines 'what  value', without a newline at the end."""
    config, model, parallel = run.config, run.model, run.config.parallel
    training, optimizer = config.training, config.optimizer
    evaluation = "none"
    if training.val_interval:
        sets = "".join(f", {each.num_samples} samples of {each.name}" for each in run.validation_sets)
        evaluation = (
            f"before the first step, every {training.val_interval} steps and at the end, "
            f"{training.val_steps} batches{sets}"
        )
    lines = {
        "experiment": run.experiment_dir,
        "model": f"{model.family}, {model.num_layers} layers, hidden size {model.hidden_size}, "
        f"{model.num_attention_heads} heads ({model.num_query_groups} key/value), "
        f"vocabulary {model.vocab_size} padded to {run.padded_vocab_size}",
        **({"rotary": _rotary(run)} if config.rope_theta or config.rope_scaling else {}),
        "tokenizer": run.hf_folder,
        "weights": run.initial_weights.checkpoint if run.initial_weights else "random",
        "data": f"{format_count(run.dataset.num_tokens)} tokens, {format_count(run.dataset.num_documents)} documents, "
        f"split {config.data.split}, sequences of {config.data.sequence_length}"
        + "".join(f", other weights from step {change.step} on" for change in run.dataset.schedule),
        "ranks": f"{run.world_size} ({run.accelerator}, {run.precision_text}) = "
        f"TP {parallel.tensor_model_parallel_size}{' with sequence parallel' if run.sequence_parallel else ''}"
        f" x PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size}"
        f" x DP {run.data_parallel_size}",
        "batch": f"{training.global_batch_size} samples a step, {training.micro_batch_size} a forward pass, "
        f"{format_count(run.tokens_per_step)} tokens a step",
        "steps": f"{run.max_steps}, a checkpoint every {training.save_interval}; evaluation {evaluation}",
        "optimizer": f"{describe_schedule(run)}, weight decay {optimizer.weight_decay:g}, clip {optimizer.clip_grad:g}",
        "seed": str(training.seed),
        "saves": "in the background" if run.async_save else "training waits for them",
        "starts": MODES.get(run.start_mode or "", "not planned"),
    }
    return "\n".join([*(f"{name:<10} {value}" for name, value in lines.items()), summarize_estimates(run)])


def _rotary(run: ResolvedRun) -> str:
    """The rotary settings that a run changes."""
    config, model = run.config, run.model
    return (
        f"base {model.rope_theta:g}, scaling {config.rope_scaling or 'as in config.json'}, context "
        f"{model.max_position_embeddings} tokens"
    )


def summarize_estimates(run: ResolvedRun) -> str:
    """What the run is expected to take, as lines of the same form."""
    estimates, recompute = run.estimates, run.recompute
    if estimates is None:
        return "estimates  none on CPU"
    gpu = f" ({run.gpu_name})" if run.gpu_name else ""
    gpu_memory = (
        f"{'' if gpu else '--gpu_name or '}--gpu_memory_gib says what it has{gpu}"
        if estimates.gpu_memory_gib is None
        else f"it has {estimates.gpu_memory_gib:.1f} GiB{gpu}"
    )
    recomputed = {"none": "none", "selective": "the MLPs", "full": f"{recompute.num_layers} layers of each stage"}
    is_final = run.kernels or run.config.training.recompute != "auto"
    lines = {
        "parameters": format_count(estimates.parameters)
        + (f", {format_count(estimates.active_parameters)} active" if run.model.num_experts else ""),
        "memory": f"{estimates.memory_gib:.1f} GiB on the fullest GPU = {estimates.weights_gib:.1f} weights, gradients "
        f"and optimizer + {estimates.activations_gib:.1f} activations + {estimates.logits_gib:.1f} logits; "
        f"{gpu_memory}",
        **(
            {"exchange": f"{estimates.exchange_gib:.1f} GiB a step from each GPU to others' experts and back"}
            if estimates.exchange_gib
            else {}
        ),
        "recomputes": recomputed[recompute.granularity] + ("" if is_final else ", expected; the compute node decides"),
        "kernels": run.kernels.describe(run.accelerator)
        if run.kernels
        else "decided on the compute node, by its packages",
    }
    if estimates.step_time_s is None or estimates.mfu is None or estimates.gpu_hours is None:
        lines["time"] = "no estimate for this GPU, precision or model"
    else:
        lines["time"] = (
            f"{format_duration(estimates.step_time_s)} a step, "
            f"{format_count(run.tokens_per_step / estimates.step_time_s)} tokens/s, {estimates.gpu_hours:.0f} "
            f"GPU-hours in all, at an assumed MFU of {estimates.mfu:.0%} (docs/pretrain.md)"
        )
    return "\n".join(f"{name:<10} {value}" for name, value in lines.items())
