from __future__ import annotations

import numpy as np
import pytest
import torch

from pretrainkit.megatron.dataset import reset_positions, row_sample, target_labels
from pretrainkit.megatron.document_attention import chunks_of, document_positions, segment_bounds


def test_segments_are_documents() -> None:
    bounds = segment_bounds(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]))
    assert bounds.tolist() == [[0, 3, 5, 6, 10]] * 2
    assert bounds.dtype == torch.int32


def test_segments_of_a_rank_are_the_parts_of_documents_in_its_chunks() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]])  # chunks of 2 for two ranks
    # Rank 0: tokens 0 to 1 and 6 to 7. The keys of the second chunk are tokens 0 to 7, of which 0 to 5 have no query.
    assert segment_bounds(positions, 0, 2).tolist() == [[0, 2, 2, 4, 6, 8], [0, 2, 8, 10, 12, 20]]
    # Rank 1: tokens 2 to 5, whose documents begin at 0 and 3.
    assert segment_bounds(positions, 1, 2).tolist() == [[0, 1, 2, 2, 4, 6, 8], [0, 3, 4, 7, 10, 14, 20]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_positions_count_from_the_begin_of_a_document(ranks: int) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]])
    query = torch.empty(8 // ranks, 2, 1, 1)
    for rank in range(ranks):
        tokens = [token for number in chunks_of(rank, ranks) for token in torch.arange(8).chunk(2 * ranks)[number]]
        tokens = tokens if ranks > 1 else range(8)
        found = document_positions(query, segment_bounds(positions, rank, ranks))
        assert found.t().tolist() == positions[:, [int(token) for token in tokens]].tolist()


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


def test_a_loss_has_the_label_of_the_document_whose_token_is_predicted() -> None:
    # Tokens a a | b b b | c ...: the first is cut by the sample's begin, the last by its end.
    ends = np.array([2, 5, 11])
    assert target_labels(np.array([7, 8, 9]), ends, 6).tolist() == [7, 8, 8, 8, 9, 9]
    assert target_labels(np.array([7]), np.array([4]), 4).tolist() == [7, 7, 7, 7]
