from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pretrainkit.megatron.attention import attend_within_documents, document_bounds, with_document_bounds
from pretrainkit.megatron.dataset import reset_positions, row_sample, target_labels


def test_bounds_lie_where_positions_begin_anew() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    assert document_bounds(positions).tolist() == [0, 3, 5, 6, 10]
    assert document_bounds(positions).dtype == torch.int32


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["one", "grouped", "all"])
def test_documents_attend_as_if_they_were_alone(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(12, 2, 4, 8, generator=generator, requires_grad=True)
    key, value = (torch.randn(12, 2, kv_heads, 8, generator=generator, requires_grad=True) for _ in range(2))
    bounds = torch.tensor([0, 5, 6, 12, 20, 24], dtype=torch.int32)
    out = attend_within_documents(query, key, value, bounds).unflatten(2, (4, 8))
    for row, begin, end in ((0, 0, 5), (0, 5, 6), (0, 6, 12), (1, 0, 8), (1, 8, 12)):
        alone = [part[begin:end, row].transpose(0, 1) for part in (query, key, value)]
        alone[1:] = [part.repeat_interleave(4 // kv_heads, dim=0) for part in alone[1:]]
        wanted = F.scaled_dot_product_attention(*alone, is_causal=True).transpose(0, 1)
        assert torch.allclose(out[begin:end, row], wanted, atol=1e-6)
    out[6:12, 0].sum().backward()
    gradient = key.grad
    assert gradient is not None
    assert gradient[6:12, 0].abs().sum() > 0 and gradient[:6, 0].abs().sum() == 0 and gradient[:, 1].abs().sum() == 0


def test_a_row_gives_its_documents_positions_and_labels_of_their_own() -> None:
    sample = row_sample(np.array([5, 6, 7, 8, 9, 0, 0], np.int32), np.array([3, 2], np.int32))
    assert sample["tokens"].tolist() == [5, 6, 7, 8, 9, 0, 0]
    assert sample["labels"][:4].tolist() == [6, 7, 8, 9]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 0, 0, 0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1]


def test_a_full_row_has_no_label_for_its_last_token() -> None:
    sample = row_sample(np.arange(4, dtype=np.int32), np.array([4], np.int32))
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3]


def test_resetting_leaves_out_ends_outside_of_the_sample() -> None:
    sample = {"tokens": torch.arange(5), "loss_mask": torch.ones(5)}
    reset_positions(sample, np.array([-2, 0, 2, 2, 5, 9]))
    assert sample["position_ids"].tolist() == [0, 1, 0, 1, 2]
    assert sample["loss_mask"].tolist() == [1, 0, 1, 1, 0]


def test_the_data_step_gets_bounds_with_each_batch() -> None:
    batches = iter([({"position_ids": torch.tensor([[0, 1, 0]])}, 0, 0), {"position_ids": torch.tensor([[0, 1, 2]])}])
    step = with_document_bounds(next)
    assert step(batches)[0]["attention_mask"].tolist() == [0, 2, 3]
    assert step(batches)["attention_mask"].tolist() == [0, 3]


def test_a_loss_has_the_label_of_the_document_whose_token_is_predicted() -> None:
    # Tokens a a | b b b | c ...: the first is cut by the sample's begin, the last by its end.
    ends = np.array([2, 5, 11])
    assert target_labels(np.array([7, 8, 9]), ends, 6).tolist() == [7, 8, 8, 8, 9, 9]
    assert target_labels(np.array([7]), np.array([4]), 4).tolist() == [7, 7, 7, 7]
