"""Batches are counted, packed and joined without losing a real token."""

from __future__ import annotations

import torch

from pretrainkit.diagnosis.observe import batches


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    """Rows 1, 2, 3, ... of the given lengths, padded at the right with 0."""
    width = max(lengths)
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.where(real, torch.arange(1, width + 1) + 100 * torch.arange(len(lengths))[:, None], 0)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}


def test_padding_is_counted_by_mask_and_by_labels() -> None:
    batch = padded(2, 5, 1)
    counts = batches.measure(batch)
    assert (counts["samples"], counts["tokens"], counts["real_tokens"]) == (3, 15, 8)
    assert counts["lengths"] == [2, 5, 1]
    del batch["attention_mask"]
    assert batches.measure(batch)["lengths"] == [2, 5, 1]


def test_ignored_labels_of_a_prompt_are_no_padding() -> None:
    batch = {"input_ids": torch.ones(1, 5, dtype=torch.long), "labels": torch.tensor([[-100, -100, 3, 4, -100]])}
    assert batches.measure(batch)["lengths"] == [4]


def test_packed_rows_hold_the_real_tokens_in_order() -> None:
    several = [padded(2, 5, 3), padded(8, 1)]
    real = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in several])
    packed = batches.packed(several, 6)
    assert [batch["input_ids"].shape for batch in packed] == [(2, 6), (1, 6)]
    assert torch.cat([batch["input_ids"] for batch in packed]).flatten().tolist() == real[:18].tolist()
    assert all(batch["attention_mask"].all() and batch["labels"].equal(batch["input_ids"]) for batch in packed)


def test_packed_rows_are_no_longer_than_a_batch_has_tokens_and_filled_up() -> None:
    few = batches.packed([padded(2, 5), padded(4, 1)], 100)
    assert [batch["input_ids"].shape for batch in few] == [(1, 6), (1, 6)]
    (filled,) = batches.packed([padded(4, 7)], 4)
    ids = filled["input_ids"].flatten().tolist()
    assert (filled["input_ids"].shape, ids[11:]) == ((3, 4), ids[:1])


def test_packing_needs_padding_and_tensors_of_one_shape() -> None:
    assert batches.can_be_packed([padded(2, 5)])
    assert batches.can_be_packed([padded(5, 5), padded(2, 5)])
    assert not batches.can_be_packed([padded(5, 5)])
    assert not batches.can_be_packed([padded(2, 5), {**padded(2, 5), "weights": torch.ones(2)}])
    assert not batches.can_be_packed([torch.ones(2, 5)])


def test_joined_batches_are_padded_to_the_widest() -> None:
    joined = batches.merged([padded(2, 5), padded(3, 1)])
    assert joined["input_ids"].shape == (4, 5)
    assert joined["attention_mask"].sum().item() == 11
    assert (joined["labels"][2:, 3:] == -100).all()
    pair = batches.merged([(torch.ones(2, 3), torch.zeros(2)), (torch.ones(2, 3), torch.zeros(2))])
    assert [tensor.shape for tensor in pair] == [(4, 3), (4,)]


def test_a_copy_keeps_tensors_and_not_containers() -> None:
    batch = {"a": [torch.ones(1)], "b": torch.zeros(1)}
    copy = batches.copied(batch)
    copy["a"].clear()
    del copy["b"]
    assert len(batch["a"]) == 1
    assert "b" in batch
    assert batches.copied(batch)["b"] is batch["b"]
