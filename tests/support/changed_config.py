"""Configs with some other values."""

from __future__ import annotations

import dataclasses
from typing import Any

from pretrainkit.config.schema import RunConfig


def changed(config: RunConfig, **changes: Any) -> RunConfig:
    """A config with other values; 'training__max_steps' names training.max_steps."""
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        if section:
            part = dataclasses.replace(getattr(config, section), **{field: value})
            config = dataclasses.replace(config, **{section: part})
        else:
            config = dataclasses.replace(config, **{field: value})
    return config
