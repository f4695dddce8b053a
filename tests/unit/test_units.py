"""Numbers for people."""

from __future__ import annotations

import pytest

from pretrainkit.units import format_bytes, format_count, format_duration, parse_duration


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_bytes(number: int, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (1_234_567, "1.23 M"), (15e12, "15.00 T"), (15e15, "15000.00 T")],
)
def test_counts(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (4.21, "4.2 s"),
        (59.94, "59.9 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (3599.6, "1 h 00 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:05:00", 300), ("23:30:00", 84600), ("1-00:00:01", 86401), ("5:30", 330), ("100:00:00", 360000)],
)
def test_time_limits_are_read_as_schedulers_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "1h", "1:2:3", "-1:00:00", "1-30:00", "1.5:00:00"])
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration like 23:30:00"):
        parse_duration(text)
