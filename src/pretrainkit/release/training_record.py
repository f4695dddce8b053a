"""What an experiment's records say of the training that led to a release, up to the step that was released."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.checkpoint.formats.hf_files import ORIGIN_NAME
from pretrainkit.config.run_file import read_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.data.hub import HUB_ID, RECORD
from pretrainkit.errors import RequestError
from pretrainkit.run.attempts import SAVED, START
from pretrainkit.run.evaluations import EVENT as EVALUATION
from pretrainkit.run.folder import RUN_FILE, SOURCE_FILE, RunFolder, step_of
from pretrainkit.run.json_lines import read_records

_HUB_CACHE = re.compile(r"/models--(?P<owner>[^/]+)--(?P<name>[^/]+)/snapshots/")
_ABSOLUTE_PATH = re.compile(r"(?P<before>^|[\s'\"=:,])(?:~|(?=/))(?:/[^\s'\":,=/]+)*/(?P<name>[^\s'\":,=/]+)/?")


@dataclass(frozen=True)
class TrainingRecord:
    """The training that led to a checkpoint; of a branch with that of the experiments it comes from."""

    folder: Path
    """Of the experiment."""
    run: ResolvedRun
    """As the attempt that saved the released step had it."""
    step: int
    records: tuple[dict[str, Any], ...]
    """Those of metrics.jsonl up to the step, in the order in which they were written."""
    sources: tuple[str, ...]
    """The source.txt of each attempt up to then."""
    parent: TrainingRecord | None = None
    """Up to the checkpoint that this experiment has branched off; None also where it is gone."""

    @property
    def lineage(self) -> list[TrainingRecord]:
        """This experiment's own training, and before it those that it comes from, oldest first."""
        return [*(self.parent.lineage if self.parent else ()), self]

    @property
    def first_run(self) -> ResolvedRun:
        """The run that the lineage began with: where its weights come from."""
        return self.lineage[0].run

    @property
    def _all_records(self) -> list[dict[str, Any]]:
        return [each for training in self.lineage for each in training.records]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The record of each step, in order; the last one, where a restart repeated the step."""
        found = {each["step"]: each for each in self._all_records if "event" not in each and "loss" in each}
        return [each for _, each in sorted(found.items())]

    @property
    def held_out(self) -> list[dict[str, Any]]:
        """The records of held-out losses, each step once, in order."""
        found = {each["step"]: each for each in self._all_records if "event" not in each and "val_loss" in each}
        return [each for _, each in sorted(found.items())]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluations, in order."""
        return [each for each in self._all_records if each.get("event") == EVALUATION]

    @property
    def rank_hours(self) -> float:
        """Of this experiment alone: hours of training steps, repeated ones included, times the ranks that took them;
        without starts and saves."""
        seconds, last, world_size = 0.0, 0, self.run.world_size
        for each in self.records:
            if each.get("event") == START:
                last, world_size = each["step"], each.get("world_size", world_size)
            elif "step_time_s" in each:
                seconds += max(each["step"] - last, 1) * each["step_time_s"] * world_size
                last = each["step"]
        return seconds / 3600

    @property
    def commands(self) -> list[str]:
        """The command lines of the attempts, each once; of absolute paths only the last name."""
        texts = [text for training in self.lineage for text in training.sources]
        found = [line[9:] for text in texts for line in text.splitlines()[:2] if line.startswith("command: ")]
        return list(dict.fromkeys(_without_folders(command) for command in found))

    @property
    def packages(self) -> dict[str, str]:
        """Versions of the packages that the last attempt used."""
        header = (self.sources[-1] if self.sources else "").partition("\n\n")[0].splitlines()[2:]
        pairs = (line.split(" ", 1) for line in header if " " in line)
        return {name: version for name, version in pairs if version != "not installed"}

    @property
    def base_model(self) -> str | None:
        """Hub id of the model that the training began from; None: it isn't known."""
        run = self.first_run
        config, weights = run.config, run.initial_weights
        folders = [Path(run.hf_folder), *([Path(weights.source)] if weights else [])]
        for folder in folders:
            if match := _HUB_CACHE.search(f"{folder}/"):
                return f"{match['owner']}/{match['name']}"
            if name := files.read_object(folder / RECORD).get("repository"):
                return str(name)
        names = [name for name in (config.nemo_model, config.hf_model_id) if name]
        return next((name for name in names if HUB_ID.fullmatch(name) and not Path(name).exists()), None)


def _without_folders(command: str) -> str:
    return _ABSOLUTE_PATH.sub(r"\g<before>\g<name>", command)


def check_there(sources: Sequence[str]) -> None:
    """Raise RequestError unless the checkpoints that a release was made from are where they were."""
    if missing := [source for source in sources if not Path(source).exists()]:
        raise RequestError(
            "is not there any more, and with it the records of the training",
            action="give the checkpoint where it is now: --source CHECKPOINT runs the gate again",
            where=missing[0],
        )


def read_training(sources: Sequence[str], released: Path) -> list[TrainingRecord]:
    """The records of the experiments whose checkpoints a release was made from, each once, in the order of the sources.

    Empty where the sources aren't checkpoints of experiments.
    """
    steps: dict[Path, list[int]] = {}
    for source in map(Path, sources):
        step = step_of(source)
        folder = source.parent.parent if step is not None else source.parent if source.name == "checkpoints" else source
        if not (folder / RUN_FILE).is_file():
            return []
        steps.setdefault(folder.resolve(), []).extend([] if step is None else [step])
    if len(steps) == 1:  # an average of checkpoints that only its statement names
        (only,) = steps.values()
        for stated in files.read_object(released / ORIGIN_NAME).get("steps", []):
            only += [parent["step"] for parent in stated.get("parents", []) if parent.get("step") is not None]
    return [_read(RunFolder(folder), max(found, default=0)) for folder, found in steps.items()]


def rank_hours(trainings: Sequence[TrainingRecord]) -> float:
    """`TrainingRecord.rank_hours` of experiments and those that they come from, each once, to its furthest step."""
    furthest: dict[Path, TrainingRecord] = {}
    for each in (one for training in trainings for one in training.lineage):
        if each.folder not in furthest or furthest[each.folder].step < each.step:
            furthest[each.folder] = each
    return sum(each.rank_hours for each in furthest.values())


def _read(folder: RunFolder, step: int) -> TrainingRecord:
    records = read_records(folder.metrics)
    saves = [each for each in records if each.get("event") == SAVED and each.get("step") == step]
    saved_s = datetime.strptime(saves[-1]["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp() if saves else None
    if saves:  # later records are of what came after, but for those of the saved weights
        end = max(index for index, each in enumerate(records) if each is saves[-1]) + 1
        later = [each for each in records[end:] if each.get("event") == EVALUATION or "val_loss" in each]
        records = [*records[:end], *later]
    records = [each for each in records if isinstance(each.get("step"), int) and each["step"] <= step]
    run_file, sources = folder.run_file, []
    for attempt in folder.attempt_folders():
        own = attempt / RUN_FILE
        if own.is_file() and (saved_s is None or own.stat().st_mtime <= saved_s):
            run_file = own  # it is copied when the attempt starts; run.json itself is that of the last start
            source = attempt / SOURCE_FILE
            sources += [source.read_text(encoding="utf-8")] if source.is_file() else []
    run = read_run(run_file)
    origin = RunFolder(Path(run.branch.experiment)) if run.branch else None
    parent = _read(origin, run.branch.step) if run.branch and origin and origin.run_file.is_file() else None
    return TrainingRecord(folder.path.resolve(), run, step, tuple(records), tuple(sources), parent)
