"""The release gate's comparison of scores: the checkpoint in Megatron-core and the release in transformers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretrainkit.evaluation.evaluate import ModelRequest, evaluate
from pretrainkit.evaluation.tasks import TaskRequest, scores_of
from pretrainkit.release.models import conversion_to_megatron, megatron_checkpoint
from pretrainkit.release.report import Check, collect
from pretrainkit.release.source import find_source

SCORE_TOLERANCE = 1e-4
"""Largest relative difference of scores that are means of losses; one more right answer of 10,000 is as much."""


def check_scores(
    source: Sequence[Path],
    released: Path,
    tasks: TaskRequest,
    *,
    hf_folder: Path | None = None,
    ignore_config_fields: tuple[str, ...] = (),
) -> list[Check]:
    """Run both models on tasks, on the CPU in fp32, and compare every score; any error is a failed check."""
    return collect("scores on tasks", _compare(source, released, tasks, hf_folder, ignore_config_fields))


def _compare(
    source: Sequence[Path], released: Path, tasks: TaskRequest, hf_folder: Path | None, ignored: tuple[str, ...]
) -> Iterator[Check]:
    compared = find_source(source, released, hf_folder=hf_folder, ignore_config_fields=ignored)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = megatron_checkpoint(compared, Path(scratch), conversion_to_megatron(hf_folder, ignored))
        both = [
            scores_of(
                evaluate(
                    ModelRequest(
                        target,
                        folder,
                        tensor_parallel_size=1,
                        device="cpu",
                        precision="fp32",
                        ignore_config_fields=ignored,
                    ),
                    tasks,
                )
            )
            for target, folder in ((checkpoint.root, compared.hf_folder), (released, None))
        ]
    trained, given = (
        {(task, name): value for task in scores for name, value in scores[task].items()} for scores in both
    )
    different = [
        f"{task} {name}: {trained[task, name]:.6g} and {given.get((task, name), math.nan):.6g}"
        for task, name in trained
        if not math.isclose(trained[task, name], given.get((task, name), math.nan), rel_tol=SCORE_TOLERANCE)
    ]
    fine = ", ".join(f"{task} {name} {value:.4g}" for (task, name), value in trained.items())
    yield Check.of("scores on tasks are those of the checkpoint", different, fine)
