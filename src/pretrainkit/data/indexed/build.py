"""Runs a preprocessing request: workers encode, results are put in order, outputs appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

from pretrainkit.data.indexed.manifest import Manifest, read_manifest
from pretrainkit.data.indexed.request import Plan, Request, check_outputs, is_written, make_plan
from pretrainkit.data.indexed.run import Run
from pretrainkit.data.indexed.state_folder import StateFolder, num_finished_outputs, remove_finished
from pretrainkit.data.tokens import encoder
from pretrainkit.data.tokens.encode_pool import EncodePool
from pretrainkit.data.tokens.parity import EnginesDiffer
from pretrainkit.data.tokens.tokenizer import TokenizerFile
from pretrainkit.errors import RequestError, machine_errors
from pretrainkit.logs import get_logger
from pretrainkit.signals import stopped_by_signals

LOGGER = get_logger(__name__)


def preprocess(request: Request) -> list[Manifest]:
    """Write the pairs, manifests and rejects that a request asks for; gives the manifests.

    Raises RequestError before any work, DataError when an input is bad or the machine fails, StoppedError on SIGTERM
    and Ctrl-C. After the last two, the same request continues where it was.
    """
    with EncodePool(request.workers) as pool:  # first of all: nothing here must have threads before the fork
        return preprocess_with(pool, request)


def preprocess_with(pool: EncodePool, request: Request, tokenizer: TokenizerFile | None = None) -> list[Manifest]:
    """The same with a pool that was entered earlier, which is closed, and a tokenizer.json that was read already."""
    _load_early(request, pool)
    plan = make_plan(request, tokenizer)
    identity = plan.identity()
    is_ended = remove_finished(plan.state_folder) or not (request.overwrite or plan.state_folder.exists())
    if is_ended and is_written(plan):
        LOGGER.info("all of it is written already, by this request")
        return _manifests(plan)
    num_finished = num_finished_outputs(plan.state_folder, identity)
    is_all = num_finished == len(plan.outputs)
    check_outputs(plan, num_finished if request.resume or is_all else 0)
    try:
        state = StateFolder(plan.state_folder, identity, resume=request.resume or is_all)
    except OSError as error:
        raise RequestError(
            f"can't be written: {error.strerror}",
            where=str(plan.state_folder),
            action="give another --output-prefix",
        ) from error
    again = f"fix it and run the same command again: finished pieces are kept in {plan.state_folder}"
    with machine_errors(plan.state_folder, again):
        try:
            with stopped_by_signals("run the same command again: it continues where it was"):
                _run_with_best_engine(plan, state, pool)
        except BaseException:
            pool.close()  # before others may continue this work
            state.close()
            raise
        state.remove()
    pool.close()
    manifests = _manifests(plan)
    if not any(manifest.num_documents for manifest in manifests):
        LOGGER.warning("no document was written")
    return manifests


def _load_early(request: Request, pool: EncodePool) -> None:
    """Load the tokenizer, a second for a large one, while the request is checked."""
    path = Path(request.tokenizer_model) / "tokenizer.json"
    if path.is_file():
        name = "tokenizers" if request.engine == "tokenizers" else encoder.default_engine()
        engine = request.engine_spec(name, path)
        if name == "fastokens" and request.verify_tokens != "off":
            pool.load_reference(engine)
        pool.load(engine)


def _run_with_best_engine(plan: Plan, state: StateFolder, pool: EncodePool) -> None:
    engine = plan.request.engine
    if engine == "auto":
        # A run that had to take tokenizers is continued with it, or it would lose its work again and again.
        engine = state.journal.engine or encoder.default_engine()
    try:
        return Run(plan, state, pool, engine).run()
    except EnginesDiffer as difference:
        LOGGER.warning("fastokens is not used, tokenizers encodes instead (slower): %s", difference)
    pool.stop()  # first: a worker could still write a part file
    state.reset("tokenizers")
    return Run(plan, state, pool, "tokenizers").run()


def _manifests(plan: Plan) -> list[Manifest]:
    """Those of all outputs, as they are on disk."""
    found = (read_manifest(prefix) for output in plan.outputs for prefix in output.prefixes)
    return [manifest for manifest in found if manifest is not None]
