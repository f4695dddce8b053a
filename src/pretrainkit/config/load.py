"""The request of a run: defaults < the site's file < --config files < flags and --set, with every type checked.

A site's file describes a cluster: configs/site/NAME.yaml, or any path. `???` in a file is OmegaConf's mark of a value
that somebody else must give: it replaces none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pretrainkit.config.option import Option
from pretrainkit.config.schema import OPTIONS, SECTIONS, RunConfig
from pretrainkit.errors import RequestError
from pretrainkit.records import decode, did_you_mean

SITES = Path(__file__).parents[3] / "configs" / "site"
"""Folder of the sites that ship with a checkout."""
_SITE_OPTIONS = {
    name.rpartition(".")[2]: option
    for name, option in OPTIONS.items()
    if name.startswith(("launch.", "training.time_")) and name not in ("launch.site", "launch.chain", "launch.requeue")
}
"""The options of a run that a site file may set, by their names there."""


_Setting = tuple[str, Any, str]
"""Name and value of an option as a request gives them, and where: 'file:line', a flag or --set."""


def load_config(
    config_files: Sequence[Path] = (), flags: Mapping[str, Any] | None = None, assignments: Sequence[str] = ()
) -> RunConfig:
    """The config that a request asks for.

    Args:
        config_files: YAML files, each of which may hold any options; later ones win. All win over the site's file,
            which is the one that `launch.site` names, by flag or in one of them.
        flags: dotted name -> value, as given on the command line; they win over the files.
        assignments: 'name=value' texts of --set; they win over the files. An option that a flag sets to
            another value is an error.

    Raises:
        RequestError: every unknown option, wrong type, missing value and unreadable file of the request at once.
    """
    problems: list[RequestError] = []
    settings: list[_Setting] = []
    for path in config_files:
        with RequestError.collected(problems):
            settings += _read_file(path)
    given = dict(flags or {})
    settings += [(name, value, OPTIONS[name].spelling) for name, value in given.items()]
    for assignment in assignments:
        with RequestError.collected(problems):
            settings.append(_read_assignment(assignment, given))
    of_site: list[_Setting] = []
    site = next((value for name, value, _ in reversed(settings) if name == "launch.site"), None)
    if isinstance(site, str):
        with RequestError.collected(problems):
            of_site = _read_file(_find_site(site))
    values: dict[str, Any] = {}
    left_open: list[tuple[Option, str]] = []
    for known, some in ((_SITE_OPTIONS, of_site), (OPTIONS, settings)):
        for name, value, where in some:
            with RequestError.collected(problems):
                option = _find_option(name, value, where, known)
                if value == MISSING:
                    left_open.append((option, where))
                    continue
                values[option.name] = _added(option, values.get(option.name), option.convert(value, where))
    if values.get("branch_from"):
        values.setdefault("nemo_model", None)  # a branch has the weights of its checkpoint
    problems += [_missing(option, where) for option, where in left_open if option.name not in values]
    RequestError.raise_all(problems)
    request: dict[str, Any] = {}
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        (request.setdefault(section, {}) if section else request)[field] = value
    return decode(RunConfig, request, all_fields=False)


def _find_option(name: str, value: Any, where: str, known: dict[str, Option]) -> Option:
    """The option of a name. Raises RequestError for an unknown one."""
    if name in known:
        return known[name]
    if name in SECTIONS and known is OPTIONS:
        raise RequestError(f"{name} is {value!r}", needed=f"fields below '{name}:'", where=where)
    if isinstance(value, dict) and known is OPTIONS:
        sections = sorted(filter(None, SECTIONS))
        needed, action = f"one of {', '.join(sections)}", did_you_mean(name, sections)
        raise RequestError(f"unknown section '{name}'", needed=needed, action=action, where=where)
    action = did_you_mean(name, known)
    needed = f"one of {', '.join(known)}" if known is _SITE_OPTIONS and not action else ""
    action = action or "the fields are listed in docs/options.md"
    raise RequestError(f"unknown field '{name}'", needed=needed, action=action, where=where)


def _missing(option: Option, where: str) -> RequestError:
    """The problem of an option that a file leaves to its user, who has not given it."""
    unset = f", or --set {option.name}=null for {option.unset}" if option.is_optional else ""
    return RequestError(
        f"{where} leaves it to you", needed=option.help, action=f"give it{unset}", where=option.spelling
    )


def _added(option: Option, earlier: Any, value: Any) -> Any:
    """Mappings, and mounts by their target, are added to those of earlier sources; any other value replaces them."""
    if option.type is dict:
        return {**(earlier or {}), **value}
    if option.name == "launch.container_mounts":
        return tuple(
            {mount.split(":")[min(1, mount.count(":"))]: mount for mount in (*(earlier or ()), *value)}.values()
        )
    return value


def _find_site(site: str) -> Path:
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


def _read_file(path: Path) -> list[_Setting]:
    """The settings of a YAML file, which may refer to each other and to environment variables as OmegaConf has it."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestError(f"can't be read: {reason}", where=f"--config {path}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RequestError(f"not valid YAML: {getattr(error, 'problem', None) or error}", where=where) from error
    except OmegaConfBaseException as error:
        raise RequestError(str(error).splitlines()[0], where=str(path)) from error
    if not isinstance(tree, dict) or not isinstance(root, yaml.MappingNode | None):
        raise RequestError("not a mapping", needed="lines of the form 'field: value'", where=str(path))
    return [(name, value, f"{path}:{line}" if line else str(path)) for name, value, line in _values(tree, root)]


def _values(tree: dict[Any, Any], node: Any, prefix: str = "") -> Iterator[tuple[str, Any, int | None]]:
    """Dotted names, values and lines; a mapping counts as a value where the schema has no section of that name."""
    nodes = {key.value: (key.start_mark.line + 1, below) for key, below in (node.value if node else ())}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        line, below = nodes.get(str(key), (None, None))
        if isinstance(value, dict) and name in SECTIONS:
            yield from _values(value, below if isinstance(below, yaml.MappingNode) else None, f"{name}.")
        elif value is not None or name not in SECTIONS:  # an empty section asks for nothing
            yield name, value, line


def _read_assignment(assignment: str, given: dict[str, Any]) -> _Setting:
    """The setting of a --set, noted in `given`: strings as they were typed, all else as YAML reads it."""
    where = f"--set {assignment}"
    name, equals, text = assignment.partition("=")
    name = name.strip().replace("-", "_")
    if not equals:
        raise RequestError("no '='", needed="FIELD=VALUE, for example optimizer.lr=1e-4", where=where)
    option = _find_option(name, text, where, OPTIONS)
    value: Any = text
    if option.type is not str:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RequestError(f"{text!r} can't be read as a value", where=where) from error
    elif option.is_optional and text in ("null", ""):
        value = None
    value = option.convert(value, where)
    if name in given and option.convert(given[name], where) != value:
        found = f"{name} is given twice, here and as {option.spelling} {given[name]}"
        raise RequestError(found, action="remove one of them", where=where)
    given[name] = value
    return name, value, where
