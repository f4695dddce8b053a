"""The release gate's comparison of models: the release in transformers, the trained model in Megatron-core.

Both run on CPU in fp32, independent of the stored dtype; if one of them was cast, the weights of the other are rounded
to the same dtype. So the computations are compared, not the rounding. megatron-core loads the model from the
checkpoint, at tensor parallel size 1 and at the next size that is possible.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrainkit.checkpoint.convert import convert, default_target
from pretrainkit.checkpoint.formats import hf
from pretrainkit.checkpoint.formats.hf_files import model_class, readable_folder, text_runner
from pretrainkit.checkpoint.formats.torch_dist import EMBEDDING, GlobalTensor, embedding_of
from pretrainkit.checkpoint.mapping import tensor_mappings
from pretrainkit.checkpoint.open import DetectedCheckpoint, detect
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.checkpoint.report import Report
from pretrainkit.checkpoint.transforms import padded_vocabulary
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.files import read_json, write_json
from pretrainkit.logs import get_logger, quiet_upstream
from pretrainkit.models.hf_config import position_boundaries, read_fields
from pretrainkit.models.multimodal import text_tensors
from pretrainkit.models.registry import family_named, read_config
from pretrainkit.release import prompts
from pretrainkit.release.report import Check, collect
from pretrainkit.release.source import ReleaseSource, find_source

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

LOGIT_TOLERANCE = 1e-4
"""Largest difference of logits in fp32, to which LOGIT_TOLERANCE_RELATIVE of the largest logit is added."""
LOGIT_TOLERANCE_RELATIVE = 1e-5
"""fp32 sums in another order under tensor parallelism; measured on SmolLM2-135M: 1.0e-4 at logits up to 36, TP=3."""
LOSS_TOLERANCE = 1e-4
"""Largest difference of held-out losses, nats per token."""
_RESULT = "result.json"
_ACTIVATIONS = "activations.pt"


@dataclass(frozen=True)
class RunOptions:
    """Inputs of the comparison."""

    long_tokens: int | None = None
    """Length of the long prompt and of each held-out sequence (`prompts.write_tokens`)."""
    num_sequences: int = 4
    """Held-out sequences for the loss."""
    text: Path | None = None
    """Held-out text; by default the language reference that ships with Python."""
    base: Path | None = None
    """Hugging Face folder of the model before training, whose loss is reported for comparison."""
    ignore_config_fields: tuple[str, ...] = ()
    """Unknown fields of config.json that change nothing in the forward pass."""
    dtype: torch.dtype | None = None
    """Both models' weights are rounded to it before they run; by default to that of the release, if it has only one."""


def check_models(
    source: Path | Sequence[Path],
    released: Path,
    *,
    hf_folder: Path | None = None,
    options: RunOptions | None = None,
) -> list[Check]:
    """Run both models on the same tokens and compare logits and losses; any error is a failed check."""
    return collect("the models run", _compare(source, released, hf_folder, options or RunOptions()))


def convert_and_check(source: Path, target: Path, options: Options) -> tuple[Report, list[Check]]:
    """Convert a model, then run both models and compare them (`--test-precision`).

    Raises RequestError before anything is written unless one of the two is a Hugging Face model.
    """
    found = detect(source)
    format = options.to or default_target(found.format)
    if (found.format is CheckpointFormat.HF) == (format is CheckpointFormat.HF):
        raise RequestError(
            f"compares a Megatron with a Hugging Face model, not {found.format} with {format}",
            where="--test-precision",
        )
    if options.new_tokens:
        raise RequestError(
            "compares two models of one vocabulary",
            where="--test-precision",
            action="leave it out with --add-tokens: verify_release.py SOURCE TARGET compares them",
        )
    report = convert(source, target, options)
    megatron, hugging_face = (source, target) if format is CheckpointFormat.HF else (target, source)
    run_options = RunOptions(ignore_config_fields=options.ignore_config_fields, dtype=options.dtype)
    return report, check_models(megatron, hugging_face, hf_folder=options.hf_folder, options=run_options)


def _compare(
    source: Path | Sequence[Path], released: Path, hf_folder: Path | None, options: RunOptions
) -> Iterator[Check]:
    compared = find_source(source, released, hf_folder=hf_folder, ignore_config_fields=options.ignore_config_fields)
    shape = compared.shape
    origin = compared.hf_folder
    fields = read_fields(read_config(origin), family_named(shape.family), str(origin / "config.json"))
    dtype = options.dtype or _only_dtype(released, shape)
    _prepare_ranks()  # it imports Megatron while the Hugging Face model runs
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names, reached = prompts.write_tokens(
            released,
            shape,
            position_boundaries(fields),
            folder,
            long_tokens=options.long_tokens,
            num_sequences=options.num_sequences,
            text=options.text,
        )
        yield reached
        losses = _run_transformers(released, folder, dtype)
        base = _run_transformers(options.base, folder, None, keep_logits=False) if options.base else None
        yield Check("transformers loads the release offline, with every weight", True, "no key missing or left over")
        conversion = conversion_to_megatron(hf_folder, options.ignore_config_fields)
        weights = megatron_checkpoint(compared, folder, conversion).weights
        embedding = embedding_of(weights)
        for size in _tensor_parallel_sizes(shape):
            logger.info("running the Megatron model at TP=%d", size)
            result = _run_megatron(size, weights, embedding, shape, dtype, folder)
            yield from _judge(result, losses, names, size, dtype)
            different = [i for i, prompt in enumerate(result["prompts"]) if not _agrees(prompt)]
            if different:
                shortest = min(different, key=lambda i: int(result["prompts"][i]["asked"]))
                _keep_outputs(released, folder, dtype, shape, shortest)
                traced = _run_megatron(size, weights, embedding, shape, dtype, folder, traced_prompt=shortest)
                yield Check(f"where the models part at TP={size}", False, f"{names[shortest]}: {traced['found']}")
    text = f"{losses['held_out']:.4f} nats per token released"
    if base is not None:
        text += f", {base['held_out']:.4f} before training ({losses['held_out'] - base['held_out']:+.4f})"
    yield Check("held-out loss", losses["held_out"] == losses["held_out"], text)


def _only_dtype(released: Path, shape: ModelShape) -> torch.dtype | None:
    """The dtype of all tensors of a (text) model that can be cast; None for several, which no cast leaves behind."""
    kept = {name for mapping in tensor_mappings(shape) if mapping.weight.keep_dtype for name in mapping.hf}
    tensors = text_tensors(hf.locate_tensors(released))[0]
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in kept}
    return dtypes.pop() if len(dtypes) == 1 else None


def _logit_bound(prompt: dict[str, Any]) -> float:
    return LOGIT_TOLERANCE + LOGIT_TOLERANCE_RELATIVE * float(prompt["largest"])


def _agrees(prompt: dict[str, Any]) -> bool:
    return bool(prompt["difference"] <= _logit_bound(prompt))


def _keep_outputs(released: Path, folder: Path, dtype: torch.dtype | None, shape: ModelShape, prompt: int) -> None:
    """Run the Hugging Face model once more for one prompt and keep the outputs of its modules."""
    import torch

    from pretrainkit.release import activations

    model, _ = _load_transformers(released, dtype)
    activations.keep_outputs(model, torch.load(folder / "tokens.pt")["prompts"][prompt], shape, folder / _ACTIVATIONS)


def _judge(
    result: dict[str, Any], losses: dict[str, float], names: Sequence[str], size: int, dtype: torch.dtype | None
) -> Iterator[Check]:
    rounded = result["rounded"] or losses["rounded"]
    note = f", weights rounded to {str(dtype).removeprefix('torch.')}" if rounded else ""
    compared = [
        {**prompt, "name": name, "bound": _logit_bound(prompt)}
        for name, prompt in zip(names, result["prompts"], strict=True)
    ]
    worst = max(compared, key=lambda prompt: prompt["difference"] / prompt["bound"])
    yield Check(
        f"logits at TP={size} are those of transformers",
        worst["difference"] <= worst["bound"],
        "largest difference {difference:.1e} at logits up to {largest:.1f} ({name}), bound {bound:.1e}, fp32".format(
            **worst
        )
        + note,
    )
    agreed, asked = (sum(prompt[count] for prompt in compared) for count in ("agreed", "asked"))
    yield Check(f"most likely tokens at TP={size}", agreed == asked, f"{agreed} of {asked} the same")
    gap = abs(result["held_out"] - losses["held_out"])
    yield Check(
        f"held-out loss at TP={size}",
        gap <= LOSS_TOLERANCE,
        f"{result['held_out']:.6f} and {losses['held_out']:.6f} nats per token{note}",
    )


def _tensor_parallel_sizes(shape: ModelShape) -> list[int]:
    """1, and the smallest larger size that the model can be cut into, if it is at most 4."""
    return [1, *[size for size in (2, 3, 4) if not Parallelism(size).problems(shape)][:1]]


def _run_transformers(
    model_folder: Path, folder: Path, dtype: torch.dtype | None, *, keep_logits: bool = True
) -> dict[str, float]:
    """Run a Hugging Face model, its weights rounded to `dtype`; keeps its logits in `logits_<i>.pt`.

    Gives the held-out loss, and whether rounding changed anything.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    quiet_upstream()
    transformers_logging.disable_progress_bar()
    logger.info("running %s in transformers", model_folder)
    model, rounded = _load_transformers(model_folder, dtype)
    tokens = torch.load(folder / "tokens.pt")
    with torch.no_grad():
        for i, prompt in enumerate(tokens["prompts"] if keep_logits else []):
            logits = model(prompt, logits_to_keep=tokens["compared"]).logits
            torch.save(logits.float().clone(), folder / f"logits_{i}.pt")
        losses = [_loss(model(row[None]).logits, row[None]) for row in tokens["held_out"]]
    return {"held_out": sum(losses) / len(losses), "rounded": rounded}


def _load_transformers(model_folder: Path, dtype: torch.dtype | None) -> tuple[Any, bool]:
    """A Hugging Face model in fp32, its weights rounded to `dtype`, and whether that changed any."""
    import torch

    model, info = model_class(model_folder).from_pretrained(
        readable_folder(model_folder),
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    left = {key: sorted(names) for key, names in info.items() if names}
    if left:
        raise CheckpointError(f"transformers reports {left}", where=str(model_folder))
    model = text_runner(model)
    return model.eval(), _round_weights(model, dtype)


def _round_weights(model: torch.nn.Module, dtype: torch.dtype | None) -> bool:
    """Round every weight of an fp32 model to a dtype, in which they stay fp32; whether that changed any."""
    import torch

    changed = False
    with torch.no_grad():
        for weight in model.parameters() if dtype else ():
            rounded = weight.to(dtype)
            changed = changed or not torch.equal(rounded.to(weight.dtype), weight)
            weight.copy_(rounded)
    return changed


def _loss(logits: Any, tokens: Any) -> float:
    """Mean cross entropy of the next token, nats; logits [1, S, V], tokens [1, S]."""
    import torch.nn.functional as F

    return float(F.cross_entropy(logits[0, :-1].float(), tokens[0, 1:]))


def conversion_to_megatron(hf_folder: Path | None, ignored: tuple[str, ...]) -> Options:
    """How `megatron_checkpoint` converts."""
    return Options(CheckpointFormat.NEMO, hf_folder, ignore_config_fields=ignored)


def megatron_checkpoint(source: ReleaseSource, scratch: Path, conversion: Options) -> DetectedCheckpoint:
    """The checkpoint of a release in the torch_dist format.

    What is in another format, averaged or gets tokens is converted for it.
    """
    found, tokens = source.found, source.extension.tokens if source.extension else ()
    if found.average or tokens or found.format in (CheckpointFormat.HF, CheckpointFormat.TORCH):
        conversion = replace(conversion, dtype=found.average and found.average.dtype, new_tokens=tokens)
        convert(found, scratch / "megatron", conversion)
        found = detect(scratch / "megatron")
    return found


def _prepare_ranks() -> None:
    """Ranks are forks of one process, which imports Megatron once for all of them and bridges it to the CPU."""
    multiprocessing.forkserver.set_forkserver_preload(["pretrainkit.megatron.preloaded_cpu"])
    multiprocessing.forkserver.ensure_running()


def _run_megatron(
    size: int,
    weights: Path,
    embedding: GlobalTensor,
    shape: ModelShape,
    dtype: torch.dtype | None,
    scratch: Path,
    *,
    traced_prompt: int | None = None,
) -> dict[str, Any]:
    """Run the Megatron model on `size` ranks, its weights rounded to `dtype`.

    Gives the comparison with the kept logits by prompt, the held-out loss, and whether rounding changed anything; with
    `traced_prompt` instead where the outputs of the modules begin to differ from the kept ones.
    """
    from torch.multiprocessing.spawn import ProcessException, start_processes

    try:
        arguments = (size, weights, embedding, shape, dtype, scratch, traced_prompt)
        start_processes(_rank, arguments, size, start_method="forkserver")
    except ProcessException as error:
        logger.error("%s", error)
        raise CheckpointError(
            f"the Megatron model failed on rank {error.error_index} of {size}", where=str(weights)
        ) from error
    return read_json(scratch / _RESULT)


def _rank(
    rank: int,
    size: int,
    weights: Path,
    embedding: GlobalTensor,
    shape: ModelShape,
    dtype: torch.dtype | None,
    scratch: Path,
    traced_prompt: int | None,
) -> None:
    import torch

    from pretrainkit.megatron.preloaded_cpu import megatron_model

    quiet_upstream()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    meeting = f"file://{scratch}/ranks_{size}_{traced_prompt}"
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=size)
    megatron_model.initialize(tensor_parallel_size=size)
    tokens = torch.load(scratch / "tokens.pt")
    model = megatron_model.load_model(
        weights,
        shape,
        key_prefix=embedding.name.removesuffix(EMBEDDING),
        padded_vocab_size=padded_vocabulary(embedding.shape[0], 1, size),
        sequence_length=max(rows.shape[1] for rows in (tokens["held_out"], *tokens["prompts"])),
    )

    def padded_logits(tokens: torch.Tensor) -> torch.Tensor:
        """Logits of tokens [1, S]; padded for the call, since experts under TP need S to be a multiple of TP."""
        padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % size))
        return megatron_model.logits(model, padded, vocab_size=shape.vocab_size)[:, : tokens.shape[1]]

    rounded, compared = _round_weights(model, dtype), []
    if traced_prompt is not None:
        from pretrainkit.release.activations import compare_outputs

        prompt = tokens["prompts"][traced_prompt]
        found = compare_outputs(model, lambda: padded_logits(prompt), shape, scratch / _ACTIVATIONS)
        if rank == 0:
            write_json(scratch / _RESULT, {"found": found})
        torch.distributed.destroy_process_group()
        return
    for i, prompt in enumerate(tokens["prompts"]):
        expected, logits = torch.load(scratch / f"logits_{i}.pt"), padded_logits(prompt)[:, -tokens["compared"] :]
        compared.append(
            {
                "difference": float((logits - expected).abs().max()),
                "largest": float(expected.abs().max()),
                "agreed": int((logits.argmax(-1) == expected.argmax(-1)).sum()),
                "asked": logits.shape[1],
            }
        )
    losses = [_loss(padded_logits(row[None]), row[None]) for row in tokens["held_out"]]
    if rank == 0:
        result = {"prompts": compared, "held_out": sum(losses) / len(losses), "rounded": rounded}
        write_json(scratch / _RESULT, result)
    torch.distributed.destroy_process_group()
