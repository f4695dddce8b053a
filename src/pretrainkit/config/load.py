"""The request of a run: defaults < --config YAML files < flags and --set, checked against the schema."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pretrainkit.config.fields import FIELDS, SECTIONS, Field, closest
from pretrainkit.config.flags import FLAGS
from pretrainkit.config.schema import RunConfig
from pretrainkit.config.site import find_site, site_field
from pretrainkit.errors import RequestError


def load_config(
    config_files: Sequence[Path] = (), flags: Mapping[str, Any] | None = None, assignments: Sequence[str] = ()
) -> RunConfig:
    """The config that a request asks for.

    Args:
        config_files: YAML files, each of which may hold any fields; later ones win. All win over the site's file,
            which is the one that `launch.site` names, by flag or in one of them.
        flags: dotted field -> value, as given on the command line; they win over the files.
        assignments: 'field=value' texts of --set; they win over the files. A field that a flag sets to
            another value is an error.

    Raises:
        RequestError: every unknown field, wrong type and unreadable file of the request at once.
    """
    problems: list[RequestError] = []
    site = _merged(config_files, flags, assignments, None, []).launch.site
    config = _merged(config_files, flags, assignments, site, problems)
    if problems:
        raise RequestError.of_all(problems)
    return _with_tuples(cast(RunConfig, OmegaConf.to_object(config)))


def _merged(
    config_files: Sequence[Path],
    flags: Mapping[str, Any] | None,
    assignments: Sequence[str],
    site: str | None,
    problems: list[RequestError],
) -> DictConfig:
    config = OmegaConf.structured(RunConfig)
    _unlock(config)
    if site is not None:
        try:
            _merge_file(config, find_site(site), problems, rename=site_field)
        except RequestError as error:
            problems.append(error)
    for path in config_files:
        try:
            _merge_file(config, path, problems)
        except RequestError as error:
            problems.append(error)
    given = dict(flags or {})
    for dotted, value in given.items():
        _assign(config, dotted, value, _flag_name(dotted), problems)
    for assignment in assignments:
        try:
            _merge_assignment(config, assignment, given, problems)
        except RequestError as error:
            problems.append(error)
    return config


def _with_tuples(config: RunConfig) -> RunConfig:
    """OmegaConf gives lists for tuples."""
    lists: dict[str, Any] = {
        field.name: tuple(value)
        for field in dataclasses.fields(config.launch)
        if isinstance(value := getattr(config.launch, field.name), list)
    }
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, **lists))


def _unlock(node: DictConfig) -> None:
    """Make a container of frozen dataclasses writable: OmegaConf takes 'frozen' to mean read-only."""
    OmegaConf.set_readonly(node, False)
    for name in SECTIONS:
        OmegaConf.set_readonly(OmegaConf.select(node, name), False)


def _merge_file(
    config: DictConfig, path: Path, problems: list[RequestError], rename: Callable[[str], str] = str
) -> None:
    tree, lines = _read_yaml(path)
    for name, value in _flatten(tree, ""):
        where = f"{path}:{lines[name]}" if name in lines else str(path)
        try:
            dotted = rename(name)
        except RequestError as error:
            problems.append(RequestError(error.found, needed=error.needed, action=error.action, where=where))
            continue
        _assign(config, dotted, value, where, problems)


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A YAML file as nested dictionaries, and the line on which each dotted name stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestError(f"can't be read: {reason}", where=f"--config {path}") from error
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RequestError(f"not valid YAML: {getattr(error, 'problem', None) or error}", where=where) from error
    except OmegaConfBaseException as error:
        raise RequestError(str(error).splitlines()[0], where=str(path)) from error
    if not isinstance(tree, dict) or not isinstance(root, yaml.MappingNode | None):
        raise RequestError("not a mapping", needed="lines of the form 'field: value'", where=str(path))
    return cast("dict[str, Any]", tree), dict(_lines_of(root, ""))


def _lines_of(node: yaml.MappingNode | None, prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value if node else ():
        dotted = f"{prefix}{key.value}"
        yield dotted, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines_of(value, f"{dotted}.")


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted names and values; a mapping counts as a value where the schema has no section of that name."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted in SECTIONS:
            yield from _flatten(value, f"{dotted}.")
        elif value is not None or dotted not in SECTIONS:  # an empty section is no request
            yield dotted, value


def _merge_assignment(config: DictConfig, assignment: str, given: dict[str, Any], problems: list[RequestError]) -> None:
    dotted, equals, text = assignment.partition("=")
    dotted = dotted.strip().replace("-", "_")
    where = f"--set {assignment}"
    if not equals:
        raise RequestError("no '='", needed="FIELD=VALUE, for example optimizer.lr=1e-4", where=where)
    field = FIELDS.get(dotted)
    value = _parse_value(field, text, where)
    if dotted in given and given[dotted] != value:
        raise RequestError(
            f"{dotted} is given twice, here and as {_flag_name(dotted)} {given[dotted]}",
            action="leave one of them out",
            where=where,
        )
    given[dotted] = value
    _assign(config, dotted, value, where, problems)


def _parse_value(field: Field | None, text: str, where: str) -> Any:
    """The value of --set: text stays as it was typed, everything else is read as YAML would."""
    if field is not None and field.type is str:
        return None if field.optional and text in ("null", "") else text
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RequestError(f"{text!r} can't be read as a value", where=where) from error


def _assign(config: DictConfig, dotted: str, value: Any, where: str, problems: list[RequestError]) -> None:
    """Set one field, or note why it can't be."""
    field = FIELDS.get(dotted)
    if field is None:
        problems.append(_unknown(dotted, value, where))
        return
    wrong = RequestError(f"{dotted} is {value!r} ({type(value).__name__})", needed=field.needed, where=where)
    if field.type in (tuple, dict):
        if not _is_of_texts(field, value):
            problems.append(wrong)
            return
        value = _added(config, dotted, value)
    if value is not None and field.type in (str, bool) and not isinstance(value, field.type):
        # OmegaConf would turn 001 into '1' and 2 into true.
        wrong.action = "put it in quotes" if field.type is str and not isinstance(value, (dict, list)) else ""
        problems.append(RequestError(wrong.found, needed=wrong.needed, action=wrong.action, where=where))
        return
    try:
        OmegaConf.update(config, dotted, _escaped(value), merge=True)
    except OmegaConfBaseException:
        problems.append(wrong)


def _escaped(value: Any) -> Any:
    """A value whose '${' is text: OmegaConf would take it for the name of another field."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


def _is_of_texts(field: Field, value: Any) -> bool:
    if field.type is dict:
        return isinstance(value, dict) and all(isinstance(text, str) for text in [*value, *value.values()])
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def _added(config: DictConfig, dotted: str, value: Any) -> Any:
    """Mounts are added to those of earlier sources, by target; OmegaConf does the same with mappings."""
    if dotted != "launch.container_mounts":
        return value if isinstance(value, dict) else list(value)
    mounts = {_target(mount): mount for mount in [*config.launch.container_mounts, *value]}
    return list(mounts.values())


def _target(mount: str) -> str:
    return mount.split(":")[min(1, mount.count(":"))]


def _unknown(dotted: str, value: Any, where: str) -> RequestError:
    if dotted in SECTIONS:
        return RequestError(f"{dotted} is {value!r}", needed=f"fields below '{dotted}:'", where=where)
    suggestion = closest(dotted, FIELDS)
    action = f"did you mean {suggestion}?" if suggestion else "the fields are listed in configs/README.md"
    return RequestError(f"unknown field '{dotted}'", action=action, where=where)


def _flag_name(dotted: str) -> str:
    return next((flag.name for flag in FLAGS if flag.field == dotted), dotted)
