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
    """The training of a release."""

    run: ResolvedRun
    """As the attempt that saved the released step had it."""
    step: int
    records: tuple[dict[str, Any], ...]
    """Those of metrics.jsonl up to the step, in the order in which they were written."""
    sources: tuple[str, ...]
    """The source.txt of each attempt up to then."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The record of each step, in order; the last one, where a restart repeated the step."""
        found = {each["step"]: each for each in self.records if "event" not in each and "loss" in each}
        return [each for _, each in sorted(found.items())]

    @property
    def held_out(self) -> list[dict[str, Any]]:
        """The records of held-out losses, each step once, in order."""
        found = {each["step"]: each for each in self.records if "event" not in each and "val_loss" in each}
        return [each for _, each in sorted(found.items())]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluations, in order."""
        return [each for each in self.records if each.get("event") == EVALUATION]

    @property
    def rank_hours(self) -> float:
        """Hours of training steps, repeated ones included, times the ranks that took them; without starts and saves."""
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
        found = [line[9:] for text in self.sources for line in text.splitlines()[:2] if line.startswith("command: ")]
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
        config, weights = self.run.config, self.run.initial_weights
        folders = [Path(self.run.hf_folder), *([Path(weights.source)] if weights else [])]
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


def read_training(sources: Sequence[str], released: Path) -> TrainingRecord | None:
    """The records of the experiment whose checkpoint, or checkpoints, a release was made from.

    None where the sources aren't checkpoints of an experiment. Raises RequestError where they are of several.
    """
    steps, folders = list[int](), set[Path]()
    for source in map(Path, sources):
        step = step_of(source)
        folder = source.parent.parent if step is not None else source.parent if source.name == "checkpoints" else source
        if not (folder / RUN_FILE).is_file():
            return None
        folders.add(folder.resolve())
        steps += [] if step is None else [step]
    if len(folders) != 1:
        raise RequestError(
            f"checkpoints of {len(folders)} experiments",
            needed="those of one, whose records make the model card",
            action="write README.md without marked sections, which is published as it is",
            where="--source",
        )
    for stated in files.read_object(released / ORIGIN_NAME).get("steps", []):
        steps += [parent["step"] for parent in stated.get("parents", []) if parent.get("step") is not None]
    return _read(RunFolder(folders.pop()), max(steps, default=0))


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
    return TrainingRecord(read_run(run_file), step, tuple(records), tuple(sources))
