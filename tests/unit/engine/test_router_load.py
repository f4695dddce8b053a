"""Loads of experts: multiples of an even share, their balance, and who starves."""

from __future__ import annotations

import pytest
import torch

from pretrainkit.engine.router_load import balances_of, loads_of, starving


def test_loads_are_multiples_of_an_even_share() -> None:
    loads = loads_of(torch.tensor([[10, 10, 10, 10], [0, 40, 0, 0], [1, 39, 60, 100]]))
    assert loads.tolist() == [[1, 1, 1, 1], [0, 4, 0, 0], pytest.approx([0.02, 0.78, 1.2, 2.0])]
    balances = balances_of(loads).tolist()
    assert balances[:2] == pytest.approx([1, 0])
    assert 0.6 < balances[2] < 0.8
    assert starving(loads) == {1: [0, 2, 3], 2: [0]}
    assert loads_of(torch.zeros((1, 4))).tolist() == [[0, 0, 0, 0]]
