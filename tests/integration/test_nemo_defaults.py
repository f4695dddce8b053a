"""The defaults of NeMo's config classes that conversion knows are those of the installed NeMo."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from pretrainkit.imports import heavy_imports
from pretrainkit.models.nemo_defaults import FIELDS, NEMO_DEFAULTS
from pretrainkit.models.registry import FAMILIES

pytestmark = pytest.mark.integration


def test_defaults_are_those_of_nemos_classes() -> None:
    with heavy_imports():
        modules = [importlib.import_module(f"nemo.collections.llm.gpt.model.{name}") for name in
                   ("llama", "mistral", "mixtral", "qwen2", "qwen3")]  # fmt: skip
    found = {}
    for name in NEMO_DEFAULTS:
        (config, *_) = (getattr(module, name) for module in modules if hasattr(module, name))
        fields = {field.name: field for field in dataclasses.fields(config)}
        values = {}
        for wanted in FIELDS:
            field = fields.get(wanted)
            default = None if field is None else field.default
            if field is not None and default is dataclasses.MISSING:
                default = field.default_factory()  # type: ignore[misc]
            values[wanted] = default
        found[name] = values
    assert found == NEMO_DEFAULTS


def test_the_classes_of_every_family_are_known() -> None:
    classes = [family.nemo for family in FAMILIES if family.nemo]
    names = {name.rpartition(":")[2] for nemo in classes for name in (nemo.config, nemo.scaled_rope_config) if name}
    assert names <= NEMO_DEFAULTS.keys()
