"""The register of patches: its rows fit upstream's code and versions, and no other module patches upstream."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import pretrainkit
from pretrainkit.config.schema import Kernels
from pretrainkit.errors import RequestError
from pretrainkit.megatron import patches
from pretrainkit.megatron.patches import Patch, value

SOURCE = Path(pretrainkit.__file__).parent
MAY_PATCH = ("megatron/patches.py", "engine/child_processes.py", "imports.py", "diagnosis")
"""The register; os.fork, for which Python has no version to refuse; the process while packages are imported; diagnosis,
which changes a user's program while it measures it."""
SETTINGS = {
    "logging.raiseExceptions",
    "os.environ",
    "sys.stderr",
    "sys.stdout",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "tqdm.monitor_interval",
}
"""Attributes that their packages document as settings."""


@pytest.mark.parametrize("patch", patches.REGISTER, ids=lambda patch: patch.target)
def test_target_exists_upstream(patch: Patch) -> None:
    owner = patch.owner
    if patch.may_be_undefined:
        assert patch.name in inspect.getsource(owner)
    else:
        assert hasattr(owner, patch.name)
    assert patch.reason
    assert not patch.problem()


def test_each_target_has_one_row() -> None:
    targets = [patch.target for patch in patches.REGISTER]
    assert len(targets) == len(set(targets))


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with a function and a class to patch."""
    module = types.ModuleType("upstream_package")
    module.__dict__.update(function=lambda: 1, Class=type("Class", (), {"method": lambda self: 1}))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def row(attribute: str, read_at: str = patches.MEGATRON, **settings: bool) -> Patch:
    return Patch(f"upstream_package:{attribute}", lambda present: lambda *_: present(*_) + 1, "", read_at, **settings)


def test_a_patch_is_applied_once(upstream: types.ModuleType) -> None:
    for _ in range(2):
        patches.apply([row("function"), row("Class.method")])
    assert upstream.function() == 2
    assert upstream.Class().method() == 2


def test_a_patch_that_was_undone_is_applied_again(upstream: types.ModuleType) -> None:
    original = upstream.function
    patches.apply([row("function")])
    upstream.function = original
    patches.apply([row("function")])
    assert upstream.function() == 2


def test_a_missing_attribute_is_an_error_unless_upstream_may_not_define_it(upstream: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match="absent"):
        patches.apply([Patch("upstream_package:absent", value(1), "")])
    patches.apply([Patch("upstream_package:absent", value(1), "", may_be_undefined=True)])
    assert upstream.absent == 1


@pytest.mark.parametrize(
    ("read_at", "words"),
    [
        ("megatron-core==0.14.0", ["megatron-core 0.16.1 is installed", "Class.method", "megatron-core==0.14.0"]),
        ("torch<2", ["torch 2.", "torch<2"]),
        ("not-there==1", ["not-there is not an installed package"]),
    ],
)
def test_a_version_that_a_patch_was_not_read_at_is_refused_before_any_is_applied(
    upstream: types.ModuleType, read_at: str, words: list[str]
) -> None:
    rows = [row("function"), row("Class.method", read_at)]
    with pytest.raises(RequestError) as error:
        patches.apply(rows)
    assert all(word in str(error.value) for word in [*words, "constraints.txt", "read_at"])
    assert (upstream.function(), upstream.Class().method()) == (1, 1)


@pytest.mark.parametrize(
    ("versions", "needed"),
    [
        ({"nemo_toolkit": "2.7.0", "megatron-core": "0.16.0"}, ""),  # nemo:26.02
        ({"nemo_toolkit": "2.7.3", "megatron-core": "0.16.1"}, ""),  # constraints.txt
        ({"nemo_toolkit": "2.6.2", "megatron-core": "0.16.1"}, patches.NEMO),
        ({"nemo_toolkit": "2.7.3", "megatron-core": "0.15.3"}, patches.MEGATRON),
        ({"nemo_toolkit": "2.7.3", "megatron-core": "0.17.0"}, patches.MEGATRON),
        ({"megatron-core": "0.16.1"}, patches.NEMO),  # nemo:26.04
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else "",
)
def test_images_whose_packages_the_patches_were_read_at(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], needed: str
) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "nemo_toolkit" and name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    rows = [*patches.NEMO_ON_CPU, *patches.REGISTER]
    if not needed:
        return patches.check_versions(rows)
    with pytest.raises(RequestError) as error:
        patches.check_versions(rows)
    assert needed in str(error.value)


def test_kernels_select_their_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []
    monkeypatch.setattr(patches, "apply", lambda rows: applied.extend(patch.target for patch in rows))
    patches.apply_kernels(Kernels(*8 * ["torch"]))
    assert not applied
    patches.apply_kernels(Kernels("torch", "torch", "triton", *5 * ["torch"]))
    assert applied == [patch.target for patch in patches.KERNELS["rotary", "triton"]]


def test_choices_with_patches_are_those_that_kernels_can_have() -> None:
    from pretrainkit.megatron import kernels

    assert patches.KERNELS.keys() <= set(kernels._FUSED.items())


def test_no_other_module_patches_upstream() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(MAY_PATCH):
            found += [f"{name}:{line}: {what}" for line, what in patched(path.read_text()) if what not in SETTINGS]
    assert not found, "attributes of upstream packages are set in megatron/patches.py alone"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.Module.cuda = None",
        "import torch.nn as nn\nnn.Module.cuda: int = 1",
        "from torch import nn\nnn.x, y = 1, 2",
        "import torch\ndef f():\n    cuda: object = torch.cuda\n    cuda.Stream = 1",
        "from torch import nn\nsetattr(nn.Module, 'cuda', 1)",
        "from torch import nn, cuda\nfor owner, name in ((nn, 'a'), (cuda, 'b')):\n    setattr(owner, name, 1)",
        "from unittest import mock\nimport torch\nmock.patch.object(torch, 'save', 1)",
        "import torch\ndel torch.cuda",
        "import os\nos.fork += 1",
    ],
)
def test_patching_is_recognised(source: str) -> None:
    assert len(list(patched(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.nn.Module()\nx.weight = 1",
        "from pretrainkit.run import metrics\nmetrics.x = 1",
        "import torch\nclass A:\n    def f(self):\n        self.x = torch.nn",
        "import torch\nconfig = {}\nconfig['a'] = torch.nn",
    ],
)
def test_other_assignments_are_not_taken_for_patches(source: str) -> None:
    assert not list(patched(source))


def patched(source: str) -> Iterator[tuple[int, str]]:
    """Line and target of each assignment to an attribute of an imported module or class that is not ours."""
    nodes = list(ast.walk(ast.parse(source)))
    foreign = {name for node in nodes for name in imported(node)}

    def is_foreign(expression: ast.expr) -> bool:
        while isinstance(expression, ast.Attribute):
            expression = expression.value
        return isinstance(expression, ast.Name) and expression.id in foreign

    def named(targets: list[ast.expr]) -> Iterator[ast.expr]:
        for target in targets:
            yield from named(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]

    for node in nodes:  # other names for what is foreign
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute | ast.Name):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if is_foreign(node.value):
                foreign |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.For) and any(map(is_foreign, named([node.iter]))):
            foreign |= {target.id for target in named([node.target]) if isinstance(target, ast.Name)}
    for node in nodes:
        targets = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [target for target in named(node.targets) if isinstance(target, ast.Attribute)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            targets = [node.target]
        elif isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func).rpartition(".")[2]
            if function in ("setattr", "delattr", "object", "__setattr__"):
                targets = node.args[:1]
        for target in targets:
            if is_foreign(target):
                yield node.lineno, ast.unparse(target)


def imported(node: ast.AST) -> Iterator[str]:
    """Names that an import statement binds to modules and classes that are not ours."""
    if isinstance(node, ast.Import):
        names = [alias for alias in node.names if not alias.name.startswith("pretrainkit")]
        yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
    elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("pretrainkit"):
        yield from (alias.asname or alias.name for alias in node.names)
