"""What publish_release.py does: the gate's report, the card, and then the upload; refused on any doubt before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrainkit import files
from pretrainkit.checkpoint.formats.hf_files import HF_SOURCE
from pretrainkit.data.hub import HUB_ID
from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger
from pretrainkit.release import card, hub_upload
from pretrainkit.release.files import MODEL_CARD
from pretrainkit.release.gate import check_hashes, check_release, fresh_report
from pretrainkit.release.hub_upload import Destination, ReleaseFile
from pretrainkit.release.models import RunOptions
from pretrainkit.release.privacy import problems_of_text
from pretrainkit.release.report import ReleaseReport, report_prefix
from pretrainkit.release.training_record import TrainingRecord, check_there, read_training
from pretrainkit.signals import STOP_SIGNALS, stopped_by_signals
from pretrainkit.units import format_bytes

log = get_logger(__name__)


@dataclass(frozen=True)
class Request:
    """What is asked of publish_release.py."""

    folder: Path
    repository: str
    revision: str = "main"
    source: Sequence[Path] = ()
    """Run the gate with these; empty: take its report."""
    hf_folder: Path | None = None
    base: Path | None = None
    private: bool = True
    licence: str | None = None
    base_model: str | None = None
    overwrite: bool = False

    @property
    def destination(self) -> Destination:
        """Where the release goes."""
        return Destination(self.repository, self.revision, self.private, self.overwrite)


def report_of(request: Request) -> ReleaseReport:
    """The gate's report of the files as they are: its fresh one, or with `source` a new one, which may have failed."""
    if "/" not in request.repository or not HUB_ID.fullmatch(request.repository):
        raise RequestError(repr(request.repository), needed="OWNER/NAME", where="REPO")
    if not request.folder.is_dir():
        raise RequestError(
            "no such folder", needed="the Hugging Face folder to be published", where=str(request.folder)
        )
    if not request.source:
        return fresh_report(request.folder)
    options = RunOptions(base=request.base)
    report = check_release(request.source, request.folder, hf_folder=request.hf_folder, options=options)
    report.write(report_prefix(request.folder))
    return report


def describe(request: Request, report: ReleaseReport) -> str:
    """Every file that would be published, with its size and hash, and the card; the hub isn't asked."""
    text = _card(request, report, on_hub=None)
    content = _with_card(request, report, text)
    visibility = "private" if request.private else "PUBLIC"
    lines = [f"{request.repository}, branch {request.revision}, {visibility}; nothing was sent", ""]
    lines += [f"{file.sha256}  {file.size:>15,}  {file.name}" for file in content]
    lines += [f"{len(content)} files, {format_bytes(sum(file.size for file in content))}", "", f"{MODEL_CARD}:", text]
    return "\n".join(lines)


def publish_release(request: Request, report: ReleaseReport) -> str:
    """Publish; gives a sentence about the commit, or that the hub has the release already."""
    _card(request, report, on_hub=None)  # what is wrong with it is said before the hub is asked
    destination = request.destination
    api = hub_upload.connect(destination)
    remote = hub_upload.look_at(api, destination)
    text = _card(request, report, on_hub=hub_upload.read_card(api, destination, remote))
    content = _with_card(request, report, text)
    if remote and hub_upload.is_published(remote, content):
        return f"{request.repository} has this release already: branch {request.revision}, commit {remote.commit}"
    other = hub_upload.other_content(remote, content) if remote else []
    if _own_card(request, report) is None:
        other = [name for name in other if name != MODEL_CARD]  # the new card is that one, with its sections filled
    if other and not request.overwrite:
        raise RequestError(
            f"branch {request.revision} of {request.repository} has other content: {', '.join(other[:10])}"
            + (f" and {len(other) - 10} more files" if len(other) > 10 else ""),
            action="name another repository, or --revision; --overwrite replaces it by a new commit",
            where="REPO",
        )
    message = f"Release of {_subject(report)}"
    with stopped_by_signals("run the same command again: it uploads only what is missing", STOP_SIGNALS):
        done = hub_upload.publish(api, destination, remote, content, message)
    size = format_bytes(sum(file.size for file in content))
    return f"published {len(content)} files, {size}: {done.url}, commit {done.commit}"


def _subject(report: ReleaseReport) -> str:
    return ", ".join(Path(source).name for source in report.sources)


def _with_card(request: Request, report: ReleaseReport, text: str) -> list[ReleaseFile]:
    check_hashes(report, request.folder)  # minutes may have passed since the gate
    found = hub_upload.release_files(request.folder, report.hashes)
    return sorted([*found, ReleaseFile.of(MODEL_CARD, text.encode())], key=lambda file: file.name)


def _own_card(request: Request, report: ReleaseReport) -> str | None:
    """The card in the folder, if the user has written it: conversion copies that of the base model."""
    path = request.folder / MODEL_CARD
    if not path.is_file():
        return None
    copies = [Path(source) / HF_SOURCE / MODEL_CARD for source in report.sources]
    if any(copy.is_file() and files.hash_file(copy) == files.hash_file(path) for copy in copies):
        return None
    return path.read_text(encoding="utf-8")


def _card(request: Request, report: ReleaseReport, on_hub: str | None) -> str:
    """The card to be published. Raises RequestError where the records leave something open, or it tells too much."""
    check_there(report.sources)
    own = _own_card(request, report)
    own = on_hub if own is None else own
    if own is not None and not card.sections_in(own):
        log.warning("the model card has no marked section, and is published as it is: %s", ", ".join(card.SECTIONS))
        text = own
    else:
        facts = _facts(request, report, own)
        text = card.new_card(facts) if own is None else card.fill(own, facts)
    if problems := list(problems_of_text(MODEL_CARD, text)):
        raise RequestError("; ".join(problems), needed="a card that everyone may read", where=MODEL_CARD)
    return text


def _facts(request: Request, report: ReleaseReport, own: str | None) -> card.CardFacts:
    trainings = read_training(report.sources, request.folder)
    if not trainings:
        raise RequestError(
            "not checkpoints of an experiment, so there are no records of a training",
            needed="the experiment's own checkpoint as the gate's source",
            action=f"or write {MODEL_CARD} in {request.folder} without marked sections, which is published as it is",
            where=", ".join(report.sources),
        )
    training = trainings[-1]
    root = training.first_run
    base_model = request.base_model or training.base_model
    is_trained_from = root.initial_weights is not None or root.branch is not None
    if base_model is None and is_trained_from:
        raise RequestError(
            "the records don't name the base model: it was a folder",
            action="name it as the hub has it: --base-model OWNER/NAME",
            where="--base-model",
        )
    base_card = _base_card(request, report, training)
    licence = {"license": request.licence} if request.licence else card.licence_of(base_card)
    stated = card.licence_of(own or "")
    if stated and licence and stated["license"] != licence["license"] and not request.licence:
        raise RequestError(
            f"the card states the licence {stated['license']}, the base model's {licence['license']}",
            needed="one licence",
            action=f"correct the card, or confirm with --license {stated['license']}",
            where=MODEL_CARD,
        )
    if not (stated or licence):
        raise RequestError(
            "the base model's folder has no card that states its licence",
            action="look it up on the hub's page of the base model: --license apache-2.0, for instance",
            where="--license",
        )
    title = request.repository.partition("/")[2]
    return card.CardFacts(title, request.folder, report, trainings, base_model, stated or licence)


def _base_card(request: Request, report: ReleaseReport, training: TrainingRecord) -> str:
    weights = training.first_run.initial_weights
    folders = [Path(source) / HF_SOURCE for source in report.sources]
    folders += [Path(training.run.hf_folder), *([Path(weights.source)] if weights else [])]
    cards = [folder / MODEL_CARD for folder in folders]
    return next((path.read_text(encoding="utf-8") for path in cards if path.is_file()), "")
