"""Files that describe a cluster: configs/site/NAME.yaml, or any path."""

from __future__ import annotations

from pathlib import Path

from pretrainkit.config.schema import OPTIONS
from pretrainkit.errors import RequestError
from pretrainkit.records import did_you_mean

SITES = Path(__file__).parents[3] / "configs" / "site"
"""Folder of the sites that ship with a checkout."""
_OF_EACH_RUN = ("launch.site", "launch.chain", "launch.requeue")
_OPTIONS = {
    name.rpartition(".")[2]: name
    for name in [
        *(name for name in OPTIONS if name.startswith("launch.")),
        "training.time_limit",
        "training.time_margin",
    ]
    if name not in _OF_EACH_RUN
}
"""The names that a site file may hold, and the options of a run that they set."""


def site_option(name: str, where: str) -> str:
    """The option of a run that a name in a site file sets. Raises RequestError, with `where`, for an unknown one."""
    if name not in _OPTIONS:
        action = did_you_mean(name, _OPTIONS)
        needed = "" if action else f"one of {', '.join(_OPTIONS)}"
        raise RequestError(f"unknown field '{name}'", needed=needed, action=action, where=where)
    return _OPTIONS[name]


def find_site(site: str) -> Path:
    """The file of a site, by name or path. Raises RequestError that lists those there are."""
    path = Path(site).expanduser()
    if path.is_file():
        return path
    named = SITES / f"{site}.yaml"
    if "/" not in site and named.is_file():
        return named
    names = sorted(file.stem for file in SITES.glob("*.yaml"))
    raise RequestError(
        f"no site file {site}",
        needed=f"a path, or one of {', '.join(names) or 'none'}",
        action=did_you_mean(site, names),
        where="--site",
    )
