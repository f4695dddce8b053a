"""The whole diagnosis: measurements, causes, checks, the report."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.diagnosis import checks, compare, html, report, sandbox
from pretrainkit.diagnosis.causes import cause
from pretrainkit.diagnosis.checks import NOT_APPLICABLE, UNCERTAIN, Check
from pretrainkit.diagnosis.evidence import Evidence, Shown, shown_by, step_s
from pretrainkit.diagnosis.findings import Findings, find
from pretrainkit.diagnosis.measure import Measured, Starter
from pretrainkit.diagnosis.program import Program
from pretrainkit.diagnosis.spec import RESTARTED, Spec
from pretrainkit.diagnosis.speed import speed_of
from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger
from pretrainkit.machine import count_cpus

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
    longest_s: float = 1800.0
    in_place: bool = False
    """Run the program with all that it writes and deletes."""
    keep: bool = False
    """Keep the scratch folder."""


def diagnose(request: Request) -> dict[str, Any]:
    """Measure, write report.json and report.html, and give the report.

    Raises RequestError for what can't be diagnosed, PretrainkitError when the program fails.
    """
    against = None
    if request.against and request.experiment:
        against = compare.against_experiment(request.experiment, request.against)
    _make_writable(request.output)
    spec = replace(request.spec, source=request.program.kind, num_cpus=count_cpus())
    scratch = Path(tempfile.mkdtemp(prefix=".diagnosis-")).resolve()
    # A run of this project writes to the folder that it is given.
    is_protected = request.program.kind != "experiment" and not request.in_place
    try:
        made = _measure(Starter(request.program, spec, scratch, request.longest_s, is_protected, request.keep))
    finally:
        if request.keep:
            log.info("scratch folder kept: %s", scratch)
        else:
            sandbox.remove(scratch)
    made["against"] = against
    if request.experiment:
        made["recorded_tokens_per_second"] = compare.recorded_rate(request.experiment)
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


def _measure(starter: Starter) -> dict[str, Any]:
    """Measure, and make the report."""
    program, spec = starter.program, starter.spec
    log.info("measuring %s", program.name)
    is_set = checks.debug_variables({**os.environ, **program.environment}, on_gpu=True)
    needed = {"debug_variables": bool(is_set), "micro_batch": program.run is not None}
    will_restart = any(needed[name] and spec.wants(name) for name in RESTARTED)
    measured = starter.measure(budget_s=spec.budget_s * (1 - RESTARTS_SHARE if will_restart else 1.0))
    ranks = list(map(Evidence, measured.ranks))
    findings = find(ranks, kind=program.kind)
    for probe in measured.broken:
        findings.note(UNCERTAIN, probe, "the program fails with this change")
    if measured.cut_short:
        findings.checks.append(Check("probes that are not listed", UNCERTAIN, f"not made: {measured.cut_short}"))
    first = ranks[0].rank
    variables = first["facts"]["variables"]
    if program.run:  # what our own code sets is meant
        variables = {name: value for name, value in variables.items() if name in os.environ}
    debugging = checks.debug_variables(variables, on_gpu=first["facts"]["device"] != "cpu")
    if debugging and spec.wants("debug_variables"):
        _without_variables(findings, starter, debugging)
    if program.run and spec.wants("micro_batch"):
        _larger_micro_batch(findings, starter, program.run, measured)
    static = checks.check_environment(debugging) + checks.check_settings(first) + checks.check_machine(measured.machine)
    made = report.build(
        program=program, ranks=ranks, speed=speed_of(ranks[0], program.run), findings=findings, static=static
    )
    made["notes"] = [*sorted({note for rank in measured.ranks for note in rank.get("notes", [])}), *measured.notes]
    return made


def _without_variables(findings: Findings, starter: Starter, names: dict[str, str]) -> None:
    """Start the program without the variables for finding faults."""
    log.info("measuring without %s", ", ".join(names))
    shown = _in_turn(starter, "debug_variables", unset=tuple(names))
    listed = " ".join(f"{name}={value}" for name, value in names.items())
    findings.judge(shown, cause("debug_variables", shown.share, listed=listed, names=" ".join(names)))


def _larger_micro_batch(findings: Findings, starter: Starter, run: ResolvedRun, measured: Measured) -> None:
    """Start the run with twice the micro batch, if the same global batch and the memory allow that."""
    size = run.config.training.micro_batch_size
    used_gib, limit_gib = measured.ranks[0].get("peak_memory_gib") or 0.0, measured.ranks[0]["facts"]["memory_gib"]
    if run.config.training.global_batch_size % (2 * size * run.data_parallel_size):
        findings.note(NOT_APPLICABLE, "micro_batch", "twice of it doesn't divide the global batch")
    elif limit_gib and used_gib > MEMORY_FOR_DOUBLING * limit_gib:
        findings.note(NOT_APPLICABLE, "micro_batch", f"{used_gib:.1f} GiB of {limit_gib:.1f} are used")
    else:
        log.info("measuring with twice the micro batch")
        shown = _in_turn(starter, "micro_batch", changes={"micro_batch_size": 2 * size})
        findings.judge(shown, cause("micro_batch", shown.share, size=size, larger=2 * size))


def _in_turn(starter: Starter, probe: str, **change: Any) -> Shown:
    """Start the program as it is and with a change, again and again, and compare undisturbed steps."""
    before: list[list[float]] = []
    after: list[list[float]] = []
    for _ in range(STARTS_PER_SETTING):
        for found, settings in ((before, {}), (after, change)):
            budget_s = starter.spec.budget_s * RESTARTS_SHARE / (2 * STARTS_PER_SETTING)
            measured = starter.measure(speed_only=True, budget_s=budget_s, **settings)
            found += [[step_s(window)] for window in measured.ranks[0]["windows"]]
    count = min(len(before), len(after))
    return shown_by(probe, before[:count], after[:count])
