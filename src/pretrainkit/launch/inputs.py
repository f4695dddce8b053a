"""The facts that a request is checked against, read from this machine, the model, the data and the run folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pretrainkit.config.resolve import RunFacts
from pretrainkit.config.schema import RunConfig
from pretrainkit.data.dataset import read_dataset
from pretrainkit.data.hub import local_folder
from pretrainkit.data.tokens.tokenizer import load_tokenizer
from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger
from pretrainkit.machine import read_machine
from pretrainkit.models.megatron_fields import nemo_model
from pretrainkit.models.registry import read_shape
from pretrainkit.run import initial_weights
from pretrainkit.run.folder import RunFolder

log = get_logger(__name__)


def inspect_inputs(config: RunConfig) -> tuple[RunFacts, list[RequestError]]:
    """The facts of a request, and the problems of the inputs they should come from.

    A fact that can't be read is None, so that all other checks still run.
    """
    experiments_dir = Path(config.experiments_dir).expanduser().resolve()
    facts = RunFacts(
        machine=read_machine(config.launch.accelerator), experiment_dir=str(experiments_dir / config.experiment)
    )
    problems: list[RequestError] = []
    for read in (_model, _dataset, _weights):
        try:
            facts = dataclasses.replace(facts, **read(config, facts))
        except RequestError as problem:
            problems.append(problem)
    return facts, problems


def _model(config: RunConfig, _: RunFacts) -> dict[str, Any]:
    if not config.hf_model_id:
        return {}
    folder = local_folder(config.hf_model_id)
    tokenizer = load_tokenizer(folder)
    shape = read_shape(folder)
    try:
        if not shape.num_experts:  # experts are refused with the layout
            nemo_model(shape)
    except RequestError as error:
        needed = "a model that NeMo can train; of other families than llama, none with llama3 rope scaling"
        raise RequestError(error.found, needed=needed, where="--hf_model_id") from None
    facts = {"tokenizer_sha256": tokenizer.sha256, "tokenizer_largest_id": tokenizer.largest_id}
    return {"model": shape, "hf_folder": str(folder), **facts}


def _dataset(config: RunConfig, _: RunFacts) -> dict[str, Any]:
    if not config.data.dataset_path:
        return {}
    found = read_dataset(config.data.dataset_path, config.data.split)
    return {"dataset": found.facts, "split_tokens": found.split_tokens, "dataset_tokenizers": found.tokenizers}


def _weights(config: RunConfig, facts: RunFacts) -> dict[str, Any]:
    if config.nemo_model is None:
        return {}
    folder = RunFolder(Path(facts.experiment_dir))
    recorded = initial_weights.of_resumed_run(config.nemo_model, folder)
    hf_folder = Path(facts.hf_folder) if facts.hf_folder else None
    try:
        located = initial_weights.locate(config.nemo_model, folder.path.parent, hf_folder=hf_folder)
    except RequestError as problem:
        if recorded is None:
            raise
        log.warning("%s: the run started from it, and continues from its own checkpoint without it", problem.found)
        return {"initial_weights": recorded}
    if facts.model:
        initial_weights.check_shape(located, facts.model)
    is_same = recorded is not None and recorded.source == located.source
    return {"initial_weights": recorded if is_same else located}
