"""The whole diagnosis: checks, measurements, causes, comparisons, reports."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.diagnosis import advice, checks, compare, data_checks, html, report
from pretrainkit.diagnosis.causes import Findings, find, gain, judged
from pretrainkit.diagnosis.checks import WARN, Check
from pretrainkit.diagnosis.evidence import WORTH_TELLING, Evidence, Shown
from pretrainkit.diagnosis.measure import Measured, Starter
from pretrainkit.diagnosis.program import Program, larger_micro_batch
from pretrainkit.diagnosis.session import guard
from pretrainkit.diagnosis.spec import SPEED_ONLY, Spec
from pretrainkit.diagnosis.speed import speed_of
from pretrainkit.diagnosis.statistics import Interval, noise_of, saved_share
from pretrainkit.logs import get_logger

FORMAT_VERSION = 1
STARTS_PER_SETTING = 2
"""A setting that needs a start of its own is measured so often, in turn with the one it is compared to."""
MEMORY_FOR_DOUBLING = 0.45
"""Share of the GPU's memory up to which twice the micro batch is tried."""
LOW_CLOCK = 0.9
"""A GPU at work below this share of its highest clock is held back."""
BUSY_MACHINE = 0.15
"""Share of the machine's cores that others may use without being told of."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Request:
    """What a user asks for."""

    program: Program
    output: Path
    """Folder of report.json and report.html."""
    experiment: Path | None = None
    """Folder of the run, when the program is one."""
    against: Path | None = None
    baselines: Path | None = None
    tokenizer: Path | None = None
    data: str | None = None
    budget_s: float = 60.0
    longest_s: float = 1800.0
    only: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    quick: bool = False
    """Without the probes that need a start of their own."""
    time_checkpoint: bool = False
    compile: bool | None = None
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
    request.output.mkdir(parents=True, exist_ok=True)
    old_temporary = guard.old_temporary_entries()
    # Beside the run's own outputs, so that saving is as fast as there.
    place = request.experiment.parent if request.experiment and request.time_checkpoint else None
    scratch = Path(tempfile.mkdtemp(prefix=".diagnosis-", dir=place)).resolve()
    try:
        return _measure_and_report(request, scratch, static, against, old_temporary)
    finally:
        if request.keep:
            log.info("scratch folder kept: %s", scratch)
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def _measure_and_report(
    request: Request,
    scratch: Path,
    static: list[Check],
    against: dict[str, Any] | None,
    old_temporary: tuple[str, ...],
) -> dict[str, Any]:
    run = request.program.run
    cpu_ids = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    spec = Spec(
        folder=str(scratch),
        source=request.program.kind,
        num_cpus=len(cpu_ids) or os.cpu_count() or 1,
        cpu_ids=cpu_ids,
        budget_s=request.budget_s,
        only=request.only,
        excluded=request.excluded,
        time_checkpoint=request.time_checkpoint,
        compile=request.compile,
        old_temporary=old_temporary,
    )
    starter = Starter(request.program, spec, scratch, request.longest_s)
    log.info("measuring %s", request.program.name)
    measured = starter.measure()
    ranks = [Evidence(rank, confirmed_after=spec.rounds) for rank in measured.ranks]
    findings = find(ranks, kind=request.program.kind)
    for probe in measured.broken:
        findings.uncertain.append(
            {"what": advice.CHECKED.get(probe, probe), "found": "the program fails with this change"}
        )
    if measured.cut_short:
        findings.uncertain.append({"what": "probes that are not listed", "found": f"not made: {measured.cut_short}"})
    first = ranks[0].rank
    on_gpu = first["facts"]["device"] != "cpu"
    variables = first["environment"]["variables"]
    if run:  # what our own code sets is meant
        variables = {name: value for name, value in variables.items() if name in os.environ}
    _debug_variables(findings, starter, checks.debug_variables(variables, on_gpu=on_gpu), request)
    if not request.quick:
        _run_settings(findings, starter, request, measured)
    speed = speed_of(ranks[0], run)
    saving = None
    if request.time_checkpoint and "checkpoint_s" in first and run:
        saving = _checkpoint_cost(findings, first["checkpoint_s"], run, speed)
    findings.rank()
    static += checks.check_environment(variables, on_gpu=on_gpu)
    static += checks.check_batches(first["observed"]["batches"], first["facts"].get("tokenizer"))
    static += _machine_checks(measured.machine)
    made = report.build(
        program=request.program,
        ranks=ranks,
        speed=speed,
        findings=findings,
        static=static,
        machine=measured.machine,
        notes=sorted({note for rank in measured.ranks for note in rank.get("notes", [])}),
    )
    made["format_version"] = FORMAT_VERSION
    made["against"] = against
    made["baseline"] = compare.against_baseline(run, speed, request.baselines) if run and request.baselines else None
    if run:
        made["metrics_jsonl"] = compare.agreement(
            request.experiment, measured.folder / "experiment", speed["timed_windows"], speed["step_time_s"]["value"]
        )
    if saving:
        made["checkpoint"] = saving
    files.write_json(request.output / "report.json", made)
    files.write_text(request.output / "report.html", html.page(made))
    return made


def _static_checks(request: Request) -> list[Check]:
    run = request.program.run
    tokenizer = request.tokenizer or (Path(run.hf_folder) if run else None)
    found = checks.check_tokenizer(tokenizer) if tokenizer else []
    places: Sequence[str] = [request.data] if request.data else run.dataset.prefixes if run else []
    for place in places:
        found += data_checks.check_data(place)
    return found


def _debug_variables(findings: Findings, starter: Starter, names: dict[str, str], request: Request) -> None:
    """What the variables for finding faults cost, by starting the program without them in turn with as it is."""
    if not names:
        return
    if request.only and "debug_variables" not in request.only:
        return
    log.info("measuring without %s", ", ".join(names))
    shown = _in_turn(starter, "debug_variables", unset=tuple(names))
    judged(findings, shown, lambda: advice.debug_variables(shown.share, gain(shown.share), names))


def _run_settings(findings: Findings, starter: Starter, request: Request, measured: Measured) -> None:
    """What needs a run of this project to be started with another setting: the size of its micro batches."""
    run = request.program.run
    changes = larger_micro_batch(run) if run else None
    if run is None or (request.only and "micro_batch" not in request.only) or "micro_batch" in request.excluded:
        return
    if changes is None:
        findings.fine.append({"what": "micro batch", "found": "twice of it doesn't divide the global batch"})
        return
    used_gib, gpus = measured.ranks[0].get("peak_memory_gib") or 0.0, measured.machine["gpus"]
    limit_gib = measured.ranks[0]["facts"].get("memory_gib")
    if limit_gib and used_gib > MEMORY_FOR_DOUBLING * limit_gib:
        findings.fine.append(
            {"what": "micro batch", "found": f"{used_gib:.1f} GiB of {limit_gib:.1f} are used, {len(gpus)} GPU"}
        )
        return
    log.info("measuring with twice the micro batch")
    shown = _in_turn(starter, "micro_batch", changes=changes)
    size = run.config.training.micro_batch_size
    judged(findings, shown, lambda: advice.run_micro_batch(shown, gain(shown.share), size, 2 * size))


def _in_turn(starter: Starter, probe: str, **change: Any) -> Shown:
    """Start the program as it is and with a change, again and again, and compare undisturbed steps."""
    before: list[list[float]] = []
    after: list[list[float]] = []
    for _ in range(STARTS_PER_SETTING):
        for found, settings in ((before, {}), (after, change)):
            measured = starter.measure(plan=SPEED_ONLY, time_checkpoint=False, **settings)
            found += [[window["wall_s"] / window["steps"]] for window in measured.ranks[0]["windows"]]
    count = min(len(before), len(after))
    share, noise = saved_share(before[:count], after[:count]), noise_of(before)
    doubt = "the windows don't agree that it saves time" if share.low <= 0 else ""
    if not doubt and share.value < noise:
        doubt = f"less than the machine's noise ({noise:.0%})"
    return Shown(probe, share, noise, count, not doubt, doubt)


def _machine_checks(machine: dict[str, Any]) -> list[Check]:
    found = [] if machine["gpus"] else [Check("GPU clock and sharing", checks.TOLD, "no GPU is seen")]
    for gpu in machine["gpus"]:
        if gpu["clock_mhz"] is None or not gpu["highest_clock_mhz"]:
            continue
        held_back = gpu["clock_mhz"] < LOW_CLOCK * gpu["highest_clock_mhz"]
        text = f"GPU {gpu['index']} at {gpu['clock_mhz']:.0f} of {gpu['highest_clock_mhz']:.0f} MHz while at work"
        text += f", {gpu['power_w']:.0f} of {gpu['power_limit_w']:.0f} W, {gpu['temperature_c']:.0f} C"
        found.append(
            Check(
                "GPU clock",
                WARN if held_back else checks.FINE,
                text,
                "look at power limit, cooling and nvidia-smi -q -d PERFORMANCE" if held_back else "",
            )
        )
    if machine["gpu_processes_of_others"]:
        names = ", ".join(item.get("name", "?") for item in machine["gpu_processes_of_others"])
        found.append(
            Check("sharing of the GPU", WARN, f"other processes compute on it: {names}", "take a GPU of its own")
        )
    others = machine["cpu_used_by_others"]
    if others is not None:
        busy = others > BUSY_MACHINE
        found.append(
            Check(
                "sharing of the CPU",
                WARN if busy else checks.FINE,
                f"others used {others:.0%} of the machine's {machine['cores']} cores",
                "diagnose on a quiet machine for narrow intervals" if busy else "",
            )
        )
    return found


def _checkpoint_cost(findings: Findings, checkpoint_s: float, run: Any, speed: dict[str, Any]) -> dict[str, Any]:
    """What saving costs at the run's interval, put among the causes where it is worth telling."""
    interval, step_s = run.config.training.save_interval, speed["step_time_s"]

    def share(end: str) -> float:
        return float(checkpoint_s / (interval * step_s[end] + checkpoint_s))

    lost = Interval(share("value"), share("high"), share("low"))
    if lost.value >= WORTH_TELLING:
        wanted = math.ceil(99 * checkpoint_s / step_s["value"])
        findings.add(advice.save_interval(lost, checkpoint_s, interval, wanted))
    else:
        found = f"takes {checkpoint_s:.3g} s every {interval} steps: {lost.value:.1%} of the time"
        findings.fine.append({"what": advice.CHECKED["checkpoint_writes"], "found": found})
    return {"seconds": checkpoint_s, "save_interval": interval, "share": lost.value}
