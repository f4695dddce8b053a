"""The release gate as a whole: files first, then both models; and its report, as long as it describes the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pretrainkit.errors import RequestError
from pretrainkit.evaluation.tasks import TaskRequest, check_tasks
from pretrainkit.release.files import MODEL_CARD, hash_files, verify_files
from pretrainkit.release.models import RunOptions, check_models
from pretrainkit.release.other_readers import check_installed, check_readers
from pretrainkit.release.report import ReleaseReport, read_report, report_prefix
from pretrainkit.release.scores import check_scores

_AGAIN = "--source CHECKPOINT runs the gate again"


def check_release(
    source: Sequence[Path],
    released: Path,
    *,
    hf_folder: Path | None = None,
    options: RunOptions | None = None,
    files_only: bool = False,
    tasks: TaskRequest | None = None,
    readers: Sequence[str] = (),
) -> ReleaseReport:
    """Every check of a release. The models run if its files are right, unless `files_only`; on `tasks` if given, and
    other programs (`other_readers`) open it.
    """
    if tasks:
        check_tasks(tasks.tasks)
    check_installed(readers)
    options = options or RunOptions()
    ignored = options.ignore_config_fields
    report = verify_files(source, released, hf_folder=hf_folder, ignore_config_fields=ignored)
    if files_only:
        report.skipped.append("the models were not run (--files-only)")
    elif not report.passed:
        report.skipped.append("the models were not run, since the files are wrong already")
    else:
        report.checks += check_models(source, released, hf_folder=hf_folder, options=options)
        if tasks:
            report.checks += check_scores(source, released, tasks, hf_folder=hf_folder, ignore_config_fields=ignored)
        if readers:
            report.checks += check_readers(released, readers)
    return report


def fresh_report(released: Path) -> ReleaseReport:
    """The report of a release, which passed every check with the files as they are now.

    The model card may have changed: the gate doesn't compare it. Raises RequestError otherwise.
    """
    path = report_prefix(released).with_suffix(report_prefix(released).suffix + ".json")
    try:
        report = read_report(path)
    except RequestError as error:
        raise RequestError(
            error.found, action=f"verify_release.py SOURCE {released}, or {_AGAIN}", where=error.where
        ) from None
    failed = [check.name for check in report.checks if not check.passed]
    if failed or not report.checks:
        raise RequestError(
            f"the gate refused this release: {', '.join(failed) or 'no check was made'}",
            action=f"see the report; after a change {_AGAIN}",
            where=str(path),
        )
    if report.skipped:
        raise RequestError(
            f"not all was checked: {'; '.join(report.skipped)}",
            needed="a report without skipped checks",
            action=f"verify_release.py without --files-only, or {_AGAIN}",
            where=str(path),
        )
    check_hashes(report, released)
    return report


def check_hashes(report: ReleaseReport, released: Path) -> None:
    """Raise RequestError unless the files of a release, but for its card, are those that the gate has seen."""
    then, now = (
        {name: digest for name, digest in hashes.items() if name != MODEL_CARD}
        for hashes in (report.hashes, hash_files(released))
    )
    changed = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if changed:
        raise RequestError(
            f"changed after the gate: {', '.join(changed)}",
            needed="the files whose hashes are in its report",
            action=_AGAIN,
            where=str(released),
        )
