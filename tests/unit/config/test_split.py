"""Splits are read strictly and divided as Megatron divides them."""

from __future__ import annotations

import pytest

from pretrainkit.config.split import num_samples, parse_split, split_bounds
from pretrainkit.errors import RequestError


@pytest.mark.parametrize(
    "split", ["", "1", "1,2", "1,2,3,4", "a,b,c", "-1,1,1", "0,1,1", "nan,1,1", "1,inf,0", "1;1;1"]
)
def test_a_malformed_split_is_refused(split: str) -> None:
    with pytest.raises(RequestError, match="--split"):
        parse_split(split)


@pytest.mark.parametrize(
    ("split", "num_sequences", "bounds"),
    [
        ("969,30,1", 1000, (0, 969, 999, 1000)),
        ("969,30,1", 10, (0, 10, 10, 10)),
        ("8,2,0", 79, (0, 63, 79, 79)),
        ("100,0,0", 5, (0, 5, 5, 5)),
        ("1,1,0", 5, (0, 2, 5, 5)),
        ("1,1,1", 0, (0, 0, 0, 0)),
    ],
)
def test_documents_are_divided_with_rounding_to_even(split: str, num_sequences: int, bounds: tuple[int, ...]) -> None:
    assert split_bounds(parse_split(split), num_sequences) == bounds


@pytest.mark.parametrize(("num_tokens", "samples"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_sample_needs_one_token_more_than_its_length(num_tokens: int, samples: int) -> None:
    assert num_samples(num_tokens, 8) == samples
