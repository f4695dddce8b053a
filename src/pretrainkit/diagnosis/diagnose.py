"""The whole diagnosis: checks, measurements, causes, comparisons, reports."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.diagnosis import checks, compare, data_checks, html, report, sandbox
from pretrainkit.diagnosis.causes import cause
from pretrainkit.diagnosis.checks import Check
from pretrainkit.diagnosis.evidence import WORTH_TELLING, Evidence, Shown, shown_by, step_s
from pretrainkit.diagnosis.findings import Findings, find
from pretrainkit.diagnosis.measure import Measured, Starter
from pretrainkit.diagnosis.program import Program
from pretrainkit.diagnosis.settings import check_settings
from pretrainkit.diagnosis.spec import SPEED_ONLY, Spec
from pretrainkit.diagnosis.speed import speed_of
from pretrainkit.diagnosis.statistics import Interval
from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger
from pretrainkit.machine import count_cpus

FORMAT_VERSION = 2
STARTS_PER_SETTING = 2
"""A setting that needs a start of its own is measured so often, in turn with the one it is compared to."""
RESTARTS_SHARE = 0.4
"""Part of the budget for a setting that needs starts of its own."""
MEMORY_FOR_DOUBLING = 0.45
"""Share of the GPU's memory up to which twice the micro batch is tried."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Request:
    """What a user asks for."""

    program: Program
    output: Path
    """Folder of report.json and report.html."""
    spec: Spec
    """What is asked of the program, as far as the user says it."""
    experiment: Path | None = None
    """Folder of the run, when the program is one."""
    against: Path | None = None
    tokenizer: Path | None = None
    data: str | None = None
    longest_s: float = 1800.0
    quick: bool = False
    """Without the probes that need a start of their own."""
    in_place: bool = False
    """Run the program with all that it writes and deletes."""
    keep: bool = False
    """Keep the scratch folder."""


def diagnose(request: Request) -> dict[str, Any]:
    """Measure, write report.json and report.html, and give the report.

    Raises RequestError for what can't be diagnosed, PretrainkitError when the program fails.
    """
    run = request.program.run
    against = None
    if request.against and run and request.experiment:
        against = compare.against_experiment(run, request.experiment, request.against)
    static = _static_checks(request)
    _make_writable(request.output)
    spec = replace(request.spec, source=request.program.kind, num_cpus=count_cpus())
    # Beside the run's own outputs, so that saving is as fast as there.
    place = request.experiment.parent if request.experiment and spec.time_checkpoint else None
    scratch = Path(tempfile.mkdtemp(prefix=".diagnosis-", dir=place)).resolve()
    # A run of this project writes to the folder that it is given.
    is_protected = request.program.kind != "experiment" and not request.in_place
    try:
        if is_protected:
            sandbox.check(scratch)
        starter = Starter(request.program, spec, scratch, request.longest_s, is_protected, request.keep)
        made = _measure(request, starter, static, against)
    finally:
        if request.keep:
            log.info("scratch folder kept: %s", scratch)
        else:
            sandbox.remove(scratch)
    files.write_json(request.output / "report.json", made)
    files.write_text(request.output / "report.html", html.page(made))
    return made


def _make_writable(output: Path) -> None:
    """Make the folder of the report. Raises RequestError where it can't be written: before minutes of measuring."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise RequestError(
            f"can't be written: {error.strerror}", action="name another folder with --output", where=str(output)
        ) from None


def _measure(request: Request, starter: Starter, static: list[Check], against: dict[str, Any] | None) -> dict[str, Any]:
    """Measure, and make the report."""
    run, spec = request.program.run, starter.spec
    log.info("measuring %s", request.program.name)
    environment = {**os.environ, **request.program.environment}
    is_set = checks.debug_variables(environment, on_gpu=True) and spec.wants("debug_variables")
    will_restart = not request.quick and (is_set or (run and spec.wants("micro_batch")))
    measured = starter.measure(budget_s=spec.budget_s * (1 - RESTARTS_SHARE if will_restart else 1.0))
    ranks = list(map(Evidence, measured.ranks))
    findings = find(ranks, kind=request.program.kind)
    for probe in measured.broken:
        findings.note(findings.uncertain, probe, "the program fails with this change")
    if measured.cut_short:
        findings.uncertain.append({"what": "probes that are not listed", "found": f"not made: {measured.cut_short}"})
    first = ranks[0].rank
    on_gpu = first["facts"]["device"] != "cpu"
    variables = first["environment"]["variables"]
    if run:  # what our own code sets is meant
        variables = {name: value for name, value in variables.items() if name in os.environ}
    if not request.quick:
        _restarts(findings, starter, measured, checks.debug_variables(variables, on_gpu=on_gpu))
    speed = speed_of(ranks[0], run)
    saving = None
    if "checkpoint_s" in first and run:
        saving = _checkpoint_cost(findings, first["checkpoint_s"], run, speed)
    static += checks.check_environment(variables, on_gpu=on_gpu)
    static += check_settings(first)
    static += checks.check_batches(first["observed"]["batches"], first["facts"].get("tokenizer"))
    static += checks.check_machine(measured.machine)
    made = report.build(
        program=request.program,
        ranks=ranks,
        speed=speed,
        findings=findings,
        static=static,
        machine=measured.machine,
        notes=[*sorted({note for rank in measured.ranks for note in rank.get("notes", [])}), *measured.notes],
    )
    made["format_version"] = FORMAT_VERSION
    made["against"] = against
    if run:
        made["metrics_jsonl"] = compare.agreement(
            request.experiment, measured.folder / "experiment", speed["timed_windows"], speed["step_time_s"]["value"]
        )
    if saving:
        made["checkpoint"] = saving
    return made


def _static_checks(request: Request) -> list[Check]:
    run = request.program.run
    tokenizer = request.tokenizer or (Path(run.hf_folder) if run else None)
    found = checks.check_tokenizer(tokenizer) if tokenizer else []
    places: Sequence[str] = [request.data] if request.data else run.dataset.prefixes if run else []
    return found + [check for place in places for check in data_checks.check_data(place)]


def _restarts(findings: Findings, starter: Starter, measured: Measured, names: dict[str, str]) -> None:
    """What needs starts of its own: without the variables for finding faults, and a run with a larger micro batch."""
    if names and starter.spec.wants("debug_variables"):
        log.info("measuring without %s", ", ".join(names))
        shown = _in_turn(starter, "debug_variables", unset=tuple(names))
        listed = " ".join(f"{name}={value}" for name, value in names.items())
        findings.judge(shown, cause("debug_variables", shown, listed=listed, names=" ".join(names)))
    if starter.program.run and starter.spec.wants("micro_batch"):
        _larger_micro_batch(findings, starter, starter.program.run, measured)


def _larger_micro_batch(findings: Findings, starter: Starter, run: ResolvedRun, measured: Measured) -> None:
    """Start the run with twice the micro batch, if the same global batch and the memory allow that."""
    size = run.config.training.micro_batch_size
    if run.config.training.global_batch_size % (2 * size * run.data_parallel_size):
        findings.note(findings.not_applicable, "micro_batch", "twice of it doesn't divide the global batch")
        return
    used_gib, limit_gib = measured.ranks[0].get("peak_memory_gib") or 0.0, measured.ranks[0]["facts"].get("memory_gib")
    if limit_gib and used_gib > MEMORY_FOR_DOUBLING * limit_gib:
        found = f"{used_gib:.1f} GiB of {limit_gib:.1f} are used on {len(measured.machine['gpus'])} GPUs"
        findings.note(findings.not_applicable, "micro_batch", found)
        return
    log.info("measuring with twice the micro batch")
    shown = _in_turn(starter, "micro_batch", changes={"micro_batch_size": 2 * size})
    findings.judge(shown, cause("micro_batch", shown, size=size, larger=2 * size))


def _in_turn(starter: Starter, probe: str, **change: Any) -> Shown:
    """Start the program as it is and with a change, again and again, and compare undisturbed steps."""
    before: list[list[float]] = []
    after: list[list[float]] = []
    for _ in range(STARTS_PER_SETTING):
        for found, settings in ((before, {}), (after, change)):
            budget_s = starter.spec.budget_s * RESTARTS_SHARE / (2 * STARTS_PER_SETTING)
            measured = starter.measure(plan=SPEED_ONLY, time_checkpoint=False, budget_s=budget_s, **settings)
            found += [[step_s(window)] for window in measured.ranks[0]["windows"]]
    count = min(len(before), len(after))
    return shown_by(probe, before[:count], after[:count])


def _checkpoint_cost(findings: Findings, checkpoint_s: float, run: Any, speed: dict[str, Any]) -> dict[str, Any]:
    """What saving costs at the run's interval, put among the causes where it is worth telling."""
    interval, step_s = run.config.training.save_interval, speed["step_time_s"]

    def share(end: str) -> float:
        return float(checkpoint_s / (interval * step_s[end] + checkpoint_s))

    lost = Interval(share("value"), share("high"), share("low"))
    if lost.value >= WORTH_TELLING:
        wanted = math.ceil(99 * checkpoint_s / step_s["value"])
        findings.add(cause("save_interval", lost, seconds=checkpoint_s, interval=interval, wanted=wanted))
    else:
        found = f"takes {checkpoint_s:.3g} s every {interval} steps: {lost.value:.1%} of the time"
        findings.note(findings.fine, "save_interval", found)
    return {"seconds": checkpoint_s, "save_interval": interval, "share": lost.value}
