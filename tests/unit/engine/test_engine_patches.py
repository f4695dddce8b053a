"""The rows of the register that need NeMo, or what a save keeps, fit NeMo's and Megatron-core's code and versions."""

from __future__ import annotations

import pytest

import pretrainkit.engine.nemo  # noqa: F401  before NeMo itself
from pretrainkit.megatron import patches
from pretrainkit.megatron.patches import Patch

ROWS = (*patches.NEMO_ON_CPU, *patches.for_saving(*2 * [lambda present: present]))


@pytest.mark.parametrize("patch", ROWS, ids=lambda patch: patch.target)
def test_target_exists_upstream(patch: Patch) -> None:
    assert callable(getattr(patch.owner, patch.name))
    assert patch.reason
    assert not patch.problem()
