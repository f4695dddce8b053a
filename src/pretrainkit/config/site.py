"""Files that describe a cluster: configs/site/NAME.yaml, or any path."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pretrainkit.config.fields import closest
from pretrainkit.config.launch import LaunchConfig
from pretrainkit.errors import RequestError

SITES = Path(__file__).parents[3] / "configs" / "site"
"""Folder of the sites that ship with a checkout."""
_OF_TRAINING = {"time_limit": "training.time_limit", "time_margin": "training.time_margin"}
_NOT_OF_A_SITE = ("site", "chain", "requeue")


def site_fields() -> list[str]:
    """Names that a site's file may hold."""
    names = [field.name for field in dataclasses.fields(LaunchConfig) if field.name not in _NOT_OF_A_SITE]
    return [*names, *_OF_TRAINING]


def site_field(name: str) -> str:
    """The dotted field of a run that a name in a site's file sets. Raises RequestError for an unknown one."""
    if name not in site_fields():
        suggestion = closest(name, site_fields())
        raise RequestError(
            f"unknown field '{name}'",
            action=f"did you mean {suggestion}?" if suggestion else "",
            needed="" if suggestion else f"one of {', '.join(site_fields())}",
        )
    return _OF_TRAINING.get(name, f"launch.{name}")


def find_site(site: str) -> Path:
    """The file of a site, by name or path. Raises RequestError that lists those there are."""
    path = Path(site).expanduser()
    if path.is_file():
        return path
    named = SITES / f"{site}.yaml"
    if "/" not in site and named.is_file():
        return named
    names = sorted(file.stem for file in SITES.glob("*.yaml"))
    suggestion = closest(site, names)
    raise RequestError(
        f"no site file {site}",
        needed=f"a path, or one of {', '.join(names) or 'none'}",
        action=f"did you mean {suggestion}?" if suggestion else "",
        where="--site",
    )
