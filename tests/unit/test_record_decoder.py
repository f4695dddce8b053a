"""Records are decoded exactly: every field has its declared type, or the error names the field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from pretrainkit.records import RecordError, decode, did_you_mean


@dataclass(frozen=True)
class Part:
    name: str
    share: float = 1.0


@dataclass(frozen=True)
class Record:
    parts: tuple[Part, ...]
    sizes: dict[str, int]
    note: str | None = None
    anything: Any = None
    best: Part | None = None
    tags: tuple[str, ...] = field(default=())


COMPLETE = {
    "parts": [{"name": "a", "share": 2}],
    "sizes": {"x": 1},
    "note": None,
    "anything": [1, "b"],
    "best": None,
    "tags": ["t"],
}


def test_nested_dataclasses_tuples_and_mappings_are_decoded() -> None:
    expected = Record((Part("a", 2.0),), {"x": 1}, None, [1, "b"], None, ("t",))
    assert decode(Record, COMPLETE) == expected
    assert type(decode(Record, COMPLETE).parts[0].share) is float


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"sizes": {"x": "1"}}, "sizes.x is '1' (str), not int"),
        ({"sizes": []}, "sizes is [] (list), not an object"),
        ({"parts": {}}, "parts is {} (dict), not a list"),
        ({"parts": [{"name": 1, "share": 1}]}, "parts[0].name is 1 (int), not str"),
        ({"parts": [{"name": "a", "share": True}]}, "parts[0].share is True (bool), not float"),
        ({"tags": None}, "tags is None (NoneType), not a list"),
        ({"best": {"share": 1.0}}, "no field 'best.name'"),
        ({"nots": 1}, "unknown field 'nots'"),
    ],
    ids=str,
)
def test_an_error_names_the_field(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(RecordError) as error:
        decode(Record, {**COMPLETE, **changes})
    assert str(error.value) == found


def test_records_of_other_versions_are_read_where_that_is_asked_for() -> None:
    newer = {**COMPLETE, "parts": [{"name": "a", "color": "red"}], "since": 3}
    assert decode(Record, newer, known_only=False, all_fields=False).parts == (Part("a"),)
    older = {"parts": [], "sizes": {}}
    assert decode(Record, older, all_fields=False) == Record((), {})
    with pytest.raises(RecordError, match="no field 'note'"):
        decode(Record, older)
    with pytest.raises(RecordError, match="no field 'sizes'"):
        decode(Record, {"parts": []}, all_fields=False)


def test_a_suggestion_goes_by_the_last_part_of_a_name_first() -> None:
    known = ("data.split", "optimizer.lr", "optimizer.min_lr", "training.val_steps", "optimizer.lr_warmup_steps")
    assert did_you_mean("training.warmup_steps", known) == "did you mean optimizer.lr_warmup_steps?"
    assert did_you_mean("training.lr", known) == "did you mean optimizer.lr?"
    assert did_you_mean("data.spilt", known, "config.") == "did you mean config.data.split?"
    assert did_you_mean("min-lr", known) == "did you mean optimizer.min_lr?"
    assert did_you_mean("zzz", known) == ""
