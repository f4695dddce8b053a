"""The engine works without the packages that are left out while it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks

pytestmark = pytest.mark.integration


def test_the_engine_is_whole_without_what_is_left_out(tmp_path: Path) -> None:
    ranks.run_ranks(ranks.look_at_imports, 1, tmp_path)
