"""The weights a run starts from: a NeMo checkpoint, or a Hugging Face folder that is converted to one, once."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pretrainkit import files
from pretrainkit.checkpoint.fingerprint import weights_fingerprint
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger
from pretrainkit.machine import installed_version
from pretrainkit.models.registry import read_shape

CACHE_NAME = ".converted"
"""Folder in experiments_dir with the checkpoints made from Hugging Face folders."""
HF_SOURCE = "hf_source"
"""Folder with the model's config.json inside a converted checkpoint (`pretrainkit.checkpoint.formats.hf_files`)."""
CONVERSION_REPORT = "conversion.json"
"""File in a converted checkpoint that tells what it was made from (`pretrainkit.checkpoint.convert`)."""
COMMIT_MARK = "complete.json"
"""Last file of a run's own checkpoint (`pretrainkit.run.checkpoints`)."""
_WHERE = "--nemo_model"

log = get_logger(__name__)


@dataclass(frozen=True)
class InitialWeights:
    """Where the weights of a run come from."""

    source: Path
    """What was asked for."""
    checkpoint: Path
    """The NeMo checkpoint: the source itself, or the place of its conversion, which may not be there yet."""

    @property
    def is_hugging_face(self) -> bool:
        """Whether the source has to be converted."""
        return self.source != self.checkpoint


def locate(nemo_model: str, experiments_dir: Path) -> InitialWeights:
    """What --nemo_model means. Raises RequestError unless it is a NeMo checkpoint or a Hugging Face folder."""
    source = Path(nemo_model).expanduser().resolve()
    needed = (
        "a NeMo checkpoint (with weights/ and context/) or a Hugging Face folder (with config.json and *.safetensors)"
    )
    if not source.is_dir():
        raise RequestError(f"no folder {nemo_model}", needed=needed, where=_WHERE)
    if (source / "weights").is_dir() and (source / "context").is_dir():
        return InitialWeights(source, source)
    if (source / "config.json").is_file() and any(source.glob("*.safetensors")):
        name = f"{source.name}-{_source_hash(source)[:16]}"
        return InitialWeights(source, experiments_dir / CACHE_NAME / name)
    step = newest_checkpoint(source / "checkpoints") or newest_checkpoint(source)
    raise RequestError(
        f"{source} is neither",
        needed=needed,
        action=f"it holds a run's checkpoints: name one of them, the newest is {step}"
        if step
        else "for another format convert it first with tools/convert_checkpoint.py",
        where=_WHERE,
    )


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest folder with a commit mark among a run's checkpoints; a start looks closer at what is in it."""
    folders = (mark.parent for mark in checkpoints.glob(f"step_*/{COMMIT_MARK}"))
    return max((folder for folder in folders if folder.name.removeprefix("step_").isdigit()), default=None)


def fingerprints(folder: Path) -> list[str]:
    """What tells initial weights again wherever they lie, without reading them: the best first; empty: nothing does.

    Two conversions of one model have the model's in common. The second, of the file that says how a checkpoint was
    made, is what older experiments recorded, and all there is where the weights were cast or trained.
    """
    if any(folder.glob("*.safetensors")):
        found = _hf_fingerprint(folder)
        return [found] if found else []
    marks = (folder / name for name in (COMMIT_MARK, CONVERSION_REPORT, "weights/.metadata"))
    mark = next((mark for mark in marks if mark.is_file()), None)
    if mark is None:
        return []
    source = _source_fingerprint(mark) if mark.name == CONVERSION_REPORT else None
    return [*([source] if source else []), files.sha256_file(mark)]


def _hf_fingerprint(folder: Path) -> str | None:
    """The fingerprint of a Hugging Face folder's weights; None when some of their files are gone."""
    try:
        return weights_fingerprint(folder)
    except FileNotFoundError:
        return None


def _source_fingerprint(report: Path) -> str | None:
    """The fingerprint of the weights that were converted, as the report of a conversion tells it."""
    try:
        return files.read_json(report).get("source_fingerprint") or None
    except (ValueError, AttributeError):  # not a report of ours
        return None


def check_shape(initial: InitialWeights, model: ModelShape) -> None:
    """Raise RequestError if the weights are of another shape than the model; NeMo's own checkpoints don't tell."""
    folder = initial.source if initial.is_hugging_face else initial.source / HF_SOURCE
    if not (folder / "config.json").is_file():
        return
    found, wanted = dataclasses.asdict(read_shape(folder)), dataclasses.asdict(model)
    differing = [f"{name} {found[name]} and not {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if differing:
        raise RequestError(
            f"not a model of the shape that --hf_model_id describes: {', '.join(differing)}",
            needed="weights and config.json of one model",
            where=_WHERE,
        )


def hf_weights(initial: InitialWeights, hf_folder: Path) -> Path | None:
    """The Hugging Face folder that the checkpoint was made from: the source, or `hf_folder` if it holds that model.

    A checkpoint that was trained, or that other tools made, was made from none: None.
    """
    if initial.is_hugging_face:
        return initial.source
    report = initial.source / CONVERSION_REPORT
    if not report.is_file() or not any(hf_folder.glob("*.safetensors")):
        return None
    wanted = _source_fingerprint(report)
    return hf_folder if wanted and wanted == _hf_fingerprint(hf_folder) else None


def provide(initial: InitialWeights, model: ModelShape) -> Path:
    """The checkpoint's folder, converted now if it isn't there; of several starts at once, one converts.

    Raises CheckpointError when a checkpoint that is there already hasn't all tensors of the model, or others.
    """
    if not initial.is_hugging_face:
        _check_tensors(initial.checkpoint, model)
        return initial.checkpoint
    with _locked(initial.checkpoint) as is_alone:
        if not initial.checkpoint.is_dir():
            if is_alone:
                _remove_leftovers(initial.checkpoint)
            log.info("converting %s once; later starts use %s", initial.source, initial.checkpoint)
            from pretrainkit.checkpoint.convert import convert

            convert(initial.source, initial.checkpoint)
    return initial.checkpoint


def _check_tensors(checkpoint: Path, model: ModelShape) -> None:
    """Raise CheckpointError unless a checkpoint holds the model's tensors, with their shapes; none is read."""
    from pretrainkit.checkpoint.detect import detect
    from pretrainkit.checkpoint.mapping import tensor_mappings
    from pretrainkit.checkpoint.targets import open_source

    open_source(detect(checkpoint), tensor_mappings(model), model)


@contextmanager
def _locked(checkpoint: Path) -> Iterator[bool]:
    """Hold the lock beside a checkpoint; yields whether it could be had.

    Where the file system has no locks, the atomic rename of the finished conversion alone decides.
    """
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with checkpoint.with_name(f"{checkpoint.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("no file locks here (%s): don't start two runs of one new model at once", error.strerror)
            yield False
        else:
            yield True


def _remove_leftovers(checkpoint: Path) -> None:
    """Remove what conversions that were killed have left: each may be as large as the model."""
    for leftover in files.leftovers(checkpoint):
        log.info("removing %s, left by a conversion that was killed", leftover)
        shutil.rmtree(leftover)


def _source_hash(folder: Path) -> str:
    """What changes when a model's files do: the small ones by content, weights by name, size and time.

    Hashing the content of hundreds of GB at every start would take minutes; any rewriting changes the time.
    """
    digest = hashlib.sha256((installed_version("pretrainkit") or "").encode())
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        elif path.is_file() and path.suffix in (".json", ".model", ".jinja", ".txt"):
            digest.update(f"{path.name} {files.sha256_file(path)}\n".encode())
    return digest.hexdigest()
