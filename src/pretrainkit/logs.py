"""The one way this project logs: to stderr, since stdout holds a command's result."""

from __future__ import annotations

import logging
import os
import sys

LOGGER_NAME = "pretrainkit"


def get_logger(module: str) -> logging.Logger:
    """The logger of a module; call it with `__name__`."""
    return logging.getLogger(module if module.startswith(LOGGER_NAME) else f"{LOGGER_NAME}.{module}")


def configure(*, verbose: bool = False, quiet: bool = False) -> None:
    """Send the project's records to stderr, with the rank in front when there are several. Only entrypoints call it."""
    rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {rank}%(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
