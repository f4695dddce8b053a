"""What a rank under diagnosis writes, made up: steps of a noisy machine, on which changes save what a test says."""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDS, ROUNDS_OF_READING = 18, 6
CHANGES = {
    "packing": "",
    "threads": "2 threads instead of 1",
    "attention": "math",
    "larger_micro_batch": "",
    "tf32": "",
}
"""Probe over kept batches -> its detail."""


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
    pairs: dict[str, list[dict[str, Any]]] = {}

    def window(probe: str, seconds: float, *, is_changed: bool = False, reads_data: bool = False) -> dict[str, Any]:
        steps = seconds * (1 + 0.02 * generator.standard_normal(4))
        slow = generator.random(4) < disturbed
        made = {
            "probe": probe,
            "is_changed": is_changed,
            "reads_data": reads_data,
            "steps": 4,
            "cpu_s": float(steps.sum()),
            "steps_s": (steps * np.where(slow, 1 + 2 * generator.random(4), 1)).tolist(),
            "phases_s": {"data": 0.1, "forward": 0.1, "backward": 0.15, "optimizer": 0.02},
        }
        made["wall_s"] = sum(made["steps_s"])
        windows.append(made)
        return made

    def measure(probe: str, rounds: int, as_is_s: float, share: float, *, reads_data: bool = False) -> None:
        for _ in range(rounds):
            before = window(probe, as_is_s, reads_data=reads_data)
            after = window(probe, as_is_s * (1 - share), is_changed=True, reads_data=reads_data and probe != "data")
            pair = {"before_s": before["steps_s"], "after_s": after["steps_s"], "reads_data": reads_data}
            pair |= {"before_cpu_s": before["cpu_s"], "after_cpu_s": after["cpu_s"]}
            pairs.setdefault(probe, []).append(pair)

    measure("data", ROUNDS, step_s, saved.get("data", 0.0), reads_data=True)
    for probe in CHANGES:
        measure(probe, ROUNDS, step_s * (1 - saved.get("data", 0.0)), saved.get(probe, 0.0))
    for probe in [name for name in saved if name.startswith("workers_")]:
        measure(probe, ROUNDS_OF_READING, step_s, saved[probe], reads_data=True)
    if world_size > 1:
        measure("no_gradient_exchange", ROUNDS_OF_READING, step_s, saved.get("exchange", 0.0), reads_data=True)
    lengths = [64, 32, 16, 41]
    batch = {"samples": 4, "tokens": 256, "real_tokens": 153, "shape": [4, 64], "lengths": lengths}
    return {
        "rank": rank,
        "world_size": world_size,
        "host": f"node{rank}",
        "ended": True,
        "windows": windows,
        "pairs": pairs,
        "switches": CHANGES,
        "seen": [batch] * 12,
        "kept": {"samples": 4, "tokens": 256, "real_tokens": 153},
        "why_not": {"anomaly_detection": "off"},
        "peak_memory_gib": 1.5,
        "observed": {
            "steps": 4,
            "backward_passes": 8,
            "wall_s": 0.37,
            "phases_s": {"data": 0.1, "forward": 0.1, "backward": 0.15, "optimizer": 0.02},
            "step_phases_s": [{"data": 0.025, "forward": 0.025, "backward": 0.04, "optimizer": 0.005}] * 4,
            "samples": [
                {"phase": "data", "where": "decode (<b>/train.py:3)", "is_tokenizer": False, "count": 30},
                {"phase": "forward", "where": "wait (/home/a/model.py:7)", "is_tokenizer": False, "count": 50},
            ],
            "reads": {},
            "compiled_frames": 0,
        },
        "facts": {
            "device": "cpu",
            "dtypes": ["torch.float32"],
            "attention_dtype": "",
            "loader": {
                "dataset": "Rows",
                "num_workers": num_workers,
                "prefetch_factor": None,
                "persistent_workers": False,
                "pin_memory": False,
                "batches": None,
            },
            "memory_gib": None,
            "optimizers": [{"class": "AdamW", "fused": True}],
            "deterministic": False,
            "tokenizer": {},
            "variables": {},
            "affinity": 2,
            "cpus": 2,
        },
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
        static=[Check("padding token", "look at", "PAD = EOS", "mask by attention_mask"), Check("BOS", "fine", "one")],
    )
