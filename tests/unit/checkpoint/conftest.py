"""Reading and comparing Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def weights() -> Callable[[Path], dict[str, Any]]:
    """Reads all tensors of a Hugging Face folder, with the safetensors package."""

    def read(folder: Path) -> dict[str, Any]:
        from safetensors.torch import load_file

        return {
            name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()
        }

    return read


@pytest.fixture(scope="session")
def assert_same(weights: Callable[[Path], dict[str, Any]]) -> Callable[[Path, Path], None]:
    """Fails unless two Hugging Face folders hold the same tensors, bit for bit."""

    def check(first: Path, second: Path) -> None:
        import torch

        expected, found = weights(first), weights(second)
        assert found.keys() == expected.keys()
        different = [
            name
            for name, tensor in expected.items()
            if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)
        ]
        assert not different

    return check
