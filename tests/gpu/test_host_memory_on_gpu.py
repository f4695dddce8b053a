"""The copies of a save find pinned memory that was made before them."""

from __future__ import annotations

import threading

import pytest
import torch

from pretrainkit.engine import host_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_copies_to_the_host_make_no_memory_that_is_there() -> None:
    sizes = [5 << 20, 3 << 20, 5 << 20, 100]
    tensors = [torch.ones(size, dtype=torch.uint8, device="cuda") for size in sizes]
    thread = threading.Thread(target=host_memory.make, args=(sizes, torch.cuda.current_device()))
    thread.start()
    thread.join()
    made = torch.cuda.host_memory_stats()["num_host_alloc"]
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    torch.cuda.synchronize()
    assert all(copy.is_pinned() and bool((copy == 1).all()) for copy in copies)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == made
