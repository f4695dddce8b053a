"""Prepared data made document by document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from pretrainkit.data.indexed import IndexedDatasetWriter

MakePair = Callable[..., Path]


@pytest.fixture
def make_pair(tmp_path: Path) -> MakePair:
    """Write documents under a name; gives the prefix."""

    def make(name: str, documents: Sequence[Sequence[int]], dtype: type = np.uint16) -> Path:
        with IndexedDatasetWriter(tmp_path / name, np.dtype(dtype)) as writer:
            for ids in documents:
                writer.add_document(ids)
        return tmp_path / name

    return make
