"""The weights a run starts from: a NeMo checkpoint, or a Hugging Face folder that is converted to one, once."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path

from pretrainkit import files
from pretrainkit.checkpoint.formats.hf_files import HF_SOURCE, REPORT_NAME, WINDOWS, weights_fingerprint
from pretrainkit.config.run_file import read_run
from pretrainkit.config.schema import InitialWeights, ModelShape, ResolvedRun, RunConfig
from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger
from pretrainkit.machine import installed_version
from pretrainkit.models.registry import read_shape, shape_of
from pretrainkit.models.rope_change import trained_config
from pretrainkit.run.checkpoints import newest_committed
from pretrainkit.run.folder import COMMIT_MARK, RunFolder
from pretrainkit.run.resume_plan import CONTINUE
from pretrainkit.signals import STOP_SIGNALS, stopped_by_signals

CACHE_NAME = ".converted"
"""Folder in experiments_dir with the checkpoints made from Hugging Face folders."""
_WHERE, _INDEX = "--nemo_model", "weights/.metadata"

log = get_logger(__name__)


def locate(nemo_model: str, experiments_dir: Path, *, hf_folder: Path | None = None) -> InitialWeights:
    """What --nemo_model means; `hf_folder` is that of --hf_model_id, which may have the same weights.

    Raises RequestError unless it is a NeMo checkpoint or a Hugging Face folder.
    """
    source = Path(nemo_model).expanduser().resolve()
    needed = (
        "a NeMo checkpoint (with weights/ and context/) or a Hugging Face folder (with config.json and *.safetensors)"
    )
    if not source.is_dir():
        raise RequestError(f"no folder {nemo_model}", needed=needed, where=_WHERE)
    if (source / "weights").is_dir() and (source / "context").is_dir():
        return of_checkpoint(source, hf_folder)
    if (source / "config.json").is_file() and any(source.glob("*.safetensors")):
        checkpoint = experiments_dir / CACHE_NAME / f"{source.name}-{_source_hash(source)[:16]}"
        return InitialWeights(str(source), str(checkpoint), _hf_fingerprint(source), hf_weights=str(source))
    newest = newest_committed(RunFolder(source).checkpoints) or newest_committed(source)
    raise RequestError(
        f"{source} is not a NeMo checkpoint or a Hugging Face folder",
        needed=needed,
        action=f"it contains a run's checkpoints: name one of them, the newest is {newest}"
        if newest
        else "convert other formats first with tools/convert_checkpoint.py",
        where=_WHERE,
    )


def of_checkpoint(checkpoint: Path, hf_folder: Path | None = None) -> InitialWeights:
    """The weights of a NeMo checkpoint, with `hf_folder` if it has those that the checkpoint was converted from."""
    fingerprint = _checkpoint_fingerprint(checkpoint)
    is_source = hf_folder and files.same_fingerprint(fingerprint, _hf_fingerprint(hf_folder))
    return InitialWeights(str(checkpoint), str(checkpoint), fingerprint, str(hf_folder) if is_source else None)


def of_resumed_run(nemo_model: str, folder: RunFolder) -> InitialWeights | None:
    """The initial weights of a run that no longer reads them, if `nemo_model` names them; they may be missing.

    It no longer reads them once it has a checkpoint with a commit mark: it continues from that, or is refused.
    """
    if newest_committed(folder.checkpoints) is None:
        return None
    try:
        run = read_run(folder.run_file)
    except RequestError:  # reported by `pretrainkit.run.identity`
        return None
    weights = run.initial_weights
    named = str(Path(nemo_model).expanduser().resolve())
    return weights if weights and (nemo_model == run.config.nemo_model or named == weights.source) else None


def check_shape(weights: InitialWeights, model: ModelShape, config: RunConfig) -> None:
    """Raise RequestError if the weights have another shape than the model, but for what the run's config changes.

    NeMo's own checkpoints don't record their shape.
    """
    if (folder := _description(weights)) is None:
        return
    shape = shape_of(trained_config(folder, config), str(folder / "config.json"))
    found, wanted = dataclasses.asdict(shape), dataclasses.asdict(model)
    differing = [f"{name} {found[name]} and not {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if differing:
        raise RequestError(
            f"not a model of the shape that --hf_model_id describes: {', '.join(differing)}",
            needed="weights and config.json of one model",
            where=_WHERE,
        )


def _description(weights: InitialWeights) -> Path | None:
    """The folder with the config.json that belongs to the weights, if there is one."""
    folder = Path(weights.source) if weights.needs_conversion else Path(weights.source, HF_SOURCE)
    return folder if (folder / "config.json").is_file() else None


def provide_for(run: ResolvedRun) -> None:
    """`provide` the weights of a finalized run if it loads them. Raises StoppedError on a signal."""
    if run.initial_weights and run.start_mode != CONTINUE:
        with stopped_by_signals("run the same command again", STOP_SIGNALS):
            # As the weights are, without the rotary settings that the run changes.
            provide(run.initial_weights, read_shape(_description(run.initial_weights) or run.hf_folder))


def provide(weights: InitialWeights, model: ModelShape) -> None:
    """Convert the weights to their checkpoint if it doesn't exist; of several starts at once, one converts.

    Raises CheckpointError when a NeMo checkpoint doesn't have exactly the model's tensors.
    """
    checkpoint = Path(weights.checkpoint)
    if not weights.needs_conversion:
        from pretrainkit.checkpoint.mapping import tensor_mappings
        from pretrainkit.checkpoint.open import detect, open_reader

        open_reader(detect(checkpoint), tensor_mappings(model), model)  # it reads names and shapes
        return
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    # Without file locks the atomic rename of the finished conversion alone decides.
    with files.locked(checkpoint.with_name(f"{checkpoint.name}.lock"), wait=True) as is_locked:
        if not checkpoint.is_dir():
            for leftover in files.leftovers(checkpoint) if is_locked else ():  # each may be as large as the model
                log.info("removing %s, left by a killed conversion", leftover)
                shutil.rmtree(leftover)
            log.info("converting %s once; later starts use %s", weights.source, checkpoint)
            from pretrainkit.checkpoint.convert import convert

            convert(Path(weights.source), checkpoint)


def _checkpoint_fingerprint(folder: Path) -> str | None:
    """A hash that identifies the weights of a NeMo checkpoint at any path, without reading them all.

    Two conversions of one model share the model's, unless one of them casts the weights. A commit mark has the
    checksums of all bytes; of another tool's checkpoint samples of each file are taken.
    """
    for name in (COMMIT_MARK, REPORT_NAME, _INDEX):
        if (folder / name).is_file():
            # A report has one of the weights that were converted, unless they were cast.
            of_source = files.read_object(folder / name).get("source_fingerprint") if name == REPORT_NAME else None
            return of_source or files.hash_file(folder / name) + (_samples(folder) if name == _INDEX else "")
    return None


def _samples(folder: Path) -> str:
    tensors = [(path, 0, path.stat().st_size) for path in sorted((folder / "weights").glob("*.distcp"))]
    return f"+{files.hash_samples(tensors, num_windows=WINDOWS)}" if tensors else ""


def _hf_fingerprint(folder: Path) -> str | None:
    """The fingerprint of a Hugging Face folder's weights; None when some of their files are missing."""
    try:
        return weights_fingerprint(folder) if any(folder.glob("*.safetensors")) else None
    except FileNotFoundError:
        return None


def _source_hash(folder: Path) -> str:
    """A hash that changes when a model's files do: small ones by content, weights by name, size and time.

    Hashing hundreds of GB at every start would take minutes; any rewriting changes the time.
    """
    digest = hashlib.sha256((installed_version("pretrainkit") or "").encode())
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        elif path.is_file() and path.suffix in (".json", ".model", ".jinja", ".txt"):
            digest.update(f"{path.name} {files.hash_file(path)}\n".encode())
    return digest.hexdigest()
