"""What a rank under diagnosis writes, made up: steps of a noisy machine, on which changes save what a test says."""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDS, CONFIRMED_AFTER = 18, 6
SWITCHES = {"packing": 0.6, "threads": 1.0, "attention": 1.0, "larger_micro_batch": 2.0, "tf32": 1.0}
"""Probe -> its work in a micro batch, of that as it is."""


def rank_result(
    generator: np.random.Generator,
    saved: dict[str, float] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    step_s: float = 0.1,
    disturbed: float = 0.05,
    num_workers: int = 0,
) -> dict[str, Any]:
    """One rank's results. `saved`: probe -> share of the time that its change saves per unit of work."""
    saved = saved or {}
    windows: list[dict[str, Any]] = []

    def window(
        probe: str, is_changed: bool, number: int, seconds: float, before: dict[str, Any] | None
    ) -> dict[str, Any]:
        steps = seconds * (1 + 0.02 * generator.standard_normal(4))
        slow = generator.random(4) < disturbed
        made = {
            "probe": probe,
            "is_changed": is_changed,
            "round": number,
            "first_step": 1 + 4 * len(windows),
            "steps": 4,
            "micro_batches": 4,
            "cpu_s": float(steps.sum()),
            "steps_s": (steps * np.where(slow, 1 + 2 * generator.random(4), 1)).tolist(),
            "phases_s": {"data": 0.1, "forward": 0.1, "backward": 0.15, "optimizer": 0.02, "backward_passes": 4},
        }
        made["wall_s"] = sum(made["steps_s"])
        if before:
            made |= {"before_s": before["steps_s"], "before_cpu_s": before["cpu_s"], "before_micro_batches": 4}
        windows.append(made)
        return made

    replay_s = step_s * (1 - saved.get("data", 0.0))
    for number in range(ROUNDS):
        as_is = window("data", False, number, step_s, None)
        window("data", True, number, replay_s, as_is)
    for number in range(ROUNDS):
        for probe, work in SWITCHES.items():
            before = window("as_is", False, number, replay_s, None)
            window(probe, True, number, replay_s * work * (1 - saved.get(probe, 0.0)), before)
    for probe in [name for name in saved if name.startswith("workers_")]:
        for number in range(CONFIRMED_AFTER):
            before = window(probe, False, number, step_s, None)
            window(probe, True, number, step_s * (1 - saved[probe]), before)
    if world_size > 1:
        for number in range(CONFIRMED_AFTER):
            before = window("no_gradient_exchange", False, number, step_s, None)
            window("no_gradient_exchange", True, number, step_s * (1 - saved.get("exchange", 0.0)), before)
    lengths = [64, 32, 16, 41]
    batch = {"samples": 4, "tokens": 256, "real_tokens": 153, "shape": [4, 64], "lengths": lengths}
    return {
        "rank": rank,
        "world_size": world_size,
        "host": f"node{rank}",
        "ended": True,
        "windows": windows,
        "switches": {
            name: {"detail": "2 threads instead of 1", "work_ratio": work, "screened": CONFIRMED_AFTER}
            for name, work in SWITCHES.items()
        },
        "reading_probes": ["data", "no_gradient_exchange", *(name for name in saved if name.startswith("workers_"))],
        "seen": [batch] * 12,
        "kept": {"samples": 4, "tokens": 256, "real_tokens": 153},
        "why_not": {"anomaly_detection": "off"},
        "peak_memory_gib": 1.5,
        "observed": {
            "steps": 4,
            "wall_s": 0.37,
            "phases_s": {"data": 0.1, "forward": 0.1, "backward": 0.15, "optimizer": 0.02, "backward_passes": 8},
            "step_phases_s": [{"data": 0.025, "forward": 0.025, "backward": 0.04, "optimizer": 0.005}] * 4,
            "samples": [
                {"phase": "data", "where": "decode (<b>/train.py:3)", "is_tokenizer": False, "count": 30},
                {"phase": "forward", "where": "wait (/home/a/model.py:7)", "is_tokenizer": False, "count": 50},
            ],
            "batches": [batch] * 4,
            "reads": {},
            "compiled_frames": 0,
        },
        "profile": {
            "wall_s": 0.2,
            "steps": 2,
            "top": [{"name": "aten::mm", "seconds": 0.1, "calls": 20}],
            "attention": {"flash": 4},
            "nccl_s": 0.0,
        },
        "facts": {
            "device": "cpu",
            "model": {"dtypes": ["float32"]},
            "loader": {
                "dataset": "Rows",
                "num_workers": num_workers,
                "prefetch_factor": None,
                "persistent_workers": False,
                "pin_memory": False,
                "batches": None,
            },
            "memory_gib": None,
            "attention": {},
            "optimizers": [{"class": "AdamW", "fused": True}],
            "deterministic": False,
            "allocator_retries": 0,
            "cpus": 2,
        },
        "environment": {"variables": {}, "affinity": 2},
        "measuring_s": 50.0,
        "notes": ["a note"],
    }


def report_of(*ranks: dict[str, Any]) -> dict[str, Any]:
    """The report on ranks, as the command makes it."""
    from pretrainkit.diagnosis import report
    from pretrainkit.diagnosis.checks import Check
    from pretrainkit.diagnosis.evidence import Evidence
    from pretrainkit.diagnosis.findings import find
    from pretrainkit.diagnosis.program import of_script
    from pretrainkit.diagnosis.speed import speed_of

    evidence = list(map(Evidence, ranks))
    return report.build(
        program=of_script("train.py --name '<script>'"),
        ranks=evidence,
        speed=speed_of(evidence[0], None),
        findings=find(evidence, kind="script"),
        static=[Check("padding token", "warn", "PAD = EOS", "mask by attention_mask"), Check("BOS", "fine", "one")],
        machine={"cores": 2, "gpus": [], "gpu_processes_of_others": [], "cpu_used_by_others": 0.0},
        notes=["a note"],
    )
