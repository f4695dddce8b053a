"""Evaluates a checkpoint or a Hugging Face folder, each as it is: nothing is exported.

A Hugging Face folder runs in transformers, a Megatron checkpoint in Megatron-core, on as many ranks as its tensor
parallel size, each of which reads its part of the weights. So scores of a checkpoint say what was trained, and equal
scores of the released folder are evidence of their own.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit import logs
from pretrainkit.checkpoint.convert import find_hf_folder
from pretrainkit.checkpoint.formats.hf_files import model_class, readable_folder, text_runner
from pretrainkit.checkpoint.formats.torch_dist import EMBEDDING, embedding_of
from pretrainkit.checkpoint.open import DetectedCheckpoint, detect
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat
from pretrainkit.checkpoint.transforms import padded_vocabulary
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.evaluation.tasks import TaskRequest, load_tasks, quiet, run_tasks
from pretrainkit.files import read_json, read_object, write_json
from pretrainkit.imports import heavy_imports
from pretrainkit.models.multimodal import is_multimodal
from pretrainkit.models.registry import read_shape, read_whole_config
from pretrainkit.run.folder import RUN_FILE, step_of

_RESULTS = "results.json"

log = logs.get_logger(__name__)


@dataclass(frozen=True)
class ModelRequest:
    """Which model to evaluate, and how it runs."""

    target: Path
    """Checkpoint or Hugging Face folder."""
    hf_folder: Path | None = None
    """config.json and tokenizer, if the checkpoint doesn't carry them."""
    tensor_parallel_size: int | None = None
    """None: as the checkpoint was trained, else 1."""
    device: str = "auto"
    """cpu, gpu, or auto: GPUs if there are as many as the tensor parallel size."""
    precision: str = "auto"
    """bf16, fp32, or auto: bf16 on a GPU, fp32 on a CPU."""
    batch_size: int = 8
    max_length: int | None = None
    """Tokens of the longest sequence; None: the model's context."""
    ignore_config_fields: tuple[str, ...] = ()


def evaluate(model: ModelRequest, tasks: TaskRequest) -> dict[str, Any]:
    """lm_eval's results. Raises RequestError before a model is loaded where something is wrong with the request."""
    loaded = load_tasks(tasks)  # before a model is; ranks load them again, from the cache
    found = detect(model.target)
    hf_folder = find_hf_folder(found, model.hf_folder)
    shape = read_shape(hf_folder, ignore_fields=model.ignore_config_fields)
    if found.format not in (CheckpointFormat.HF, CheckpointFormat.NEMO, CheckpointFormat.TORCH_DIST):
        raise RequestError(
            f"a checkpoint of the format {found.format}",
            needed=f"{CheckpointFormat.HF}, {CheckpointFormat.NEMO} or {CheckpointFormat.TORCH_DIST}",
            action="convert it first: tools/convert_checkpoint.py",
            where=str(model.target),
        )
    max_length = min(model.max_length or shape.max_position_embeddings, shape.max_position_embeddings)
    if found.format is CheckpointFormat.HF:
        return _in_transformers(model, tasks, loaded, max_length)
    return _in_megatron(model, tasks, found, hf_folder, shape, max_length)


def _choose_device(asked: str, ranks: int) -> str:
    import torch

    gpus = torch.cuda.device_count()
    if asked == "gpu" and gpus < ranks:
        raise RequestError(f"{gpus} GPUs", needed=f"{ranks}: one for each rank", where="--device")
    return ("gpu" if gpus >= ranks else "cpu") if asked == "auto" else asked


def _is_bf16(asked: str, device: str) -> bool:
    return asked == "bf16" or (asked == "auto" and device == "gpu")


def _in_transformers(model: ModelRequest, tasks: TaskRequest, loaded: Any, max_length: int) -> dict[str, Any]:
    device = _choose_device(model.device, 1)
    with heavy_imports():
        import torch
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging
    from lm_eval.models.huggingface import HFLM

    transformers_logging.disable_progress_bar()
    log.info("running %s in transformers, on %s", model.target, device)
    folder, place = readable_folder(model.target.absolute()), "cuda" if device == "gpu" else "cpu"
    dtype = torch.bfloat16 if _is_bf16(model.precision, device) else torch.float32
    opened: dict[str, Any] = {"pretrained": str(folder), "dtype": dtype}
    if is_multimodal(read_whole_config(folder)):  # of which lm_eval's class doesn't open every one
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        whole = text_runner(model_class(folder).from_pretrained(folder, dtype=dtype, **options)).eval().to(place)
        opened = {"pretrained": whole, "tokenizer": AutoTokenizer.from_pretrained(folder, **options)}
    lm = HFLM(**opened, device=place, batch_size=model.batch_size, max_length=max_length)
    return run_tasks(lm, tasks, loaded)


def tensor_parallel_size_of(checkpoint: Path) -> int:
    """The tensor parallel size that a checkpoint of an experiment was trained with; 1 for others."""
    run = read_object(checkpoint.parent.parent / RUN_FILE) if step_of(checkpoint) is not None else {}
    return int(run.get("config", {}).get("parallel", {}).get("tensor_model_parallel_size", 1))


def _in_megatron(
    model: ModelRequest,
    tasks: TaskRequest,
    found: DetectedCheckpoint,
    hf_folder: Path,
    shape: ModelShape,
    max_length: int,
) -> dict[str, Any]:
    from torch.multiprocessing.spawn import ProcessException, start_processes

    size = model.tensor_parallel_size or tensor_parallel_size_of(model.target)
    RequestError.raise_all(Parallelism(size).problems(shape))
    device = _choose_device(model.device, size)
    embedding = embedding_of(found.weights)
    log.info("running %s in Megatron-core at TP=%d, on %s", model.target, size, device)
    with tempfile.TemporaryDirectory() as scratch:
        rank = _Rank(
            size,
            on_gpu=device == "gpu",
            precision="bf16" if _is_bf16(model.precision, device) else "fp32",
            weights=found.weights,
            key_prefix=embedding.name.removesuffix(EMBEDDING),
            padded_vocab_size=padded_vocabulary(embedding.shape[0], 1, size),
            hf_folder=Path(readable_folder(hf_folder.absolute())),
            shape=shape,
            max_length=max_length,
            batch_size=model.batch_size,
            tasks=tasks,
            scratch=Path(scratch),
        )
        if device == "cpu":  # forks of one process that has imported Megatron once
            multiprocessing.forkserver.set_forkserver_preload(["pretrainkit.megatron.preloaded_cpu"])
        try:
            start_processes(_run, (rank,), size, start_method="forkserver" if device == "cpu" else "spawn")
        except ProcessException as error:
            log.error("%s", error)
            raise CheckpointError(f"rank {error.error_index} of {size} failed", where=str(model.target)) from error
        return dict(read_json(Path(scratch) / _RESULTS))


@dataclass(frozen=True)
class _Rank:
    """What each rank gets."""

    size: int
    on_gpu: bool
    precision: str
    weights: Path
    key_prefix: str
    padded_vocab_size: int
    hf_folder: Path
    shape: ModelShape
    max_length: int
    batch_size: int
    tasks: TaskRequest
    scratch: Path


def _run(rank: int, asked: _Rank) -> None:
    import torch

    from pretrainkit.signals import die_with_parent

    die_with_parent()
    logs.configure(quiet=rank > 0)
    logs.quiet_upstream()
    if rank:  # lm_eval's progress bars
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    from pretrainkit.evaluation import megatron_lm

    megatron = megatron_lm.join_ranks(rank, asked.size, f"file://{asked.scratch}/ranks", on_gpu=asked.on_gpu)
    model = megatron.load_model(
        asked.weights,
        asked.shape,
        key_prefix=asked.key_prefix,
        padded_vocab_size=asked.padded_vocab_size,
        sequence_length=asked.max_length,
        precision=asked.precision,
    )
    with quiet():
        lm = megatron_lm.MegatronLM(
            megatron_lm.compute_logits(model, asked.shape, asked.size),
            asked.hf_folder,
            torch.device("cuda", rank) if asked.on_gpu else torch.device("cpu"),
            batch_size=asked.batch_size,
            max_length=asked.max_length,
        )
    results = run_tasks(lm, asked.tasks, load_tasks(asked.tasks))
    if rank == 0:
        write_json(asked.scratch / _RESULTS, _plain(results))
    torch.distributed.destroy_process_group()


def _plain(value: Any) -> Any:
    """A value as JSON has it; what JSON doesn't have as text."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
