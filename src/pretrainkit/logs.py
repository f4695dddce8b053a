"""The one way this project logs: to stderr, since stdout holds a command's result."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping

LOGGER_NAME = "pretrainkit"
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
"""Environment variables whose values are in no log and no record of a run."""
VERBOSE_VARIABLE = "PRETRAINKIT_VERBOSE"
"""Environment variable of the processes that a verbose command starts."""
MASK = "***"
_SECRET_NAME = re.compile(r"TOKEN$|API_KEY|SECRET|PASSWORD|PASSWD")


def get_logger(module: str) -> logging.Logger:
    """The logger of a module; call it with `__name__`."""
    return logging.getLogger(module if module.startswith(LOGGER_NAME) else f"{LOGGER_NAME}.{module}")


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds a token or password."""
    return name in TOKEN_VARIABLES or bool(_SECRET_NAME.search(name))


def masked(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` with the value of every token variable replaced by ***."""
    values = os.environ if environment is None else environment
    for name in TOKEN_VARIABLES:
        if token := values.get(name):
            text = text.replace(token, MASK)
    return text


def configure(*, verbose: bool = False, quiet: bool = False) -> None:
    """Send the project's records to stderr, with the rank in front when there are several. Only entrypoints call it.

    Processes that a verbose one starts are verbose, too.
    """
    rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {rank}%(levelname)s %(message)s", "%H:%M:%S"))
    # A record that can't be written, as on a full disk, would be a traceback of logging's own, of each library, too.
    logging.raiseExceptions = False
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers[:] = [handler]
    logger.propagate = False
    if verbose:
        os.environ[VERBOSE_VARIABLE] = "1"
    is_verbose = VERBOSE_VARIABLE in os.environ
    logger.setLevel(logging.DEBUG if is_verbose else logging.WARNING if quiet else logging.INFO)
    # Said by torch at import wherever nvidia-resiliency-ext, which NeMo needs, has installed that package.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)


def quiet_upstream() -> None:
    """Leave the terminal to our own records: of NeMo, Lightning and Megatron only what went wrong is shown."""
    upstream = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    for name in (*upstream, "megatron", "torch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Its loggers set levels of their own, and report telemetry that is off as an error after every failure.
    telemetry = logging.getLogger("nv_one_logger")
    telemetry.addHandler(logging.NullHandler())
    telemetry.propagate = False
    # On CPU every torch call passes through pretrainkit.megatron.cpu, whose lines their warnings then carry.
    modules = r"(torch|nemo|megatron|lightning|transformers|pydantic|pretrainkit\.megatron\.cpu)\b"
    warnings.filterwarnings("ignore", module=modules)
