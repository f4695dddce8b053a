"""The engine's rows of the register fit NeMo's and Megatron-core's code and versions."""

from __future__ import annotations

import pytest

from pretrainkit.engine import patches
from pretrainkit.megatron.patches import Patch


@pytest.mark.parametrize("patch", [*patches.CPU, *patches.keep_errors(lambda present: present)], ids=lambda p: p.target)
def test_target_exists_upstream(patch: Patch) -> None:
    assert callable(getattr(patch.owner, patch.name))
    assert patch.reason
    assert not patch.problem()
