"""A message says where, what was found, what is needed and what to do."""

from __future__ import annotations

import pytest

from pretrainkit.errors import CheckpointError, DataError, PretrainkitError, RequestError


def test_all_parts_are_in_the_message() -> None:
    error = RequestError("10 found", needed="8 or 16", action="use 8", where="--size")
    assert str(error) == "--size: 10 found\n  Needed: 8 or 16\n  What to do: use 8"
    assert str(RequestError("10 found")) == "10 found"


def test_one_problem_stays_itself_and_several_are_told_together() -> None:
    first, second = RequestError("a", where="x"), RequestError("b")
    RequestError.raise_all([])
    with pytest.raises(RequestError) as error:
        RequestError.raise_all([first])
    assert error.value is first
    with pytest.raises(RequestError) as error:
        RequestError.raise_all([first, second])
    assert str(error.value) == "2 problems:\n- x: a\n- b"


@pytest.mark.parametrize(
    ("kind", "exit_code"), [(PretrainkitError, 1), (DataError, 1), (CheckpointError, 1), (RequestError, 2)]
)
def test_kinds_know_their_exit_code(kind: type[PretrainkitError], exit_code: int) -> None:
    assert kind("x").exit_code == exit_code and isinstance(kind("x"), PretrainkitError)
