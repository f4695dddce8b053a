"""Numbers with units, for people."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def format_count(number: float) -> str:
    """A count in decimal units: 1_234_567 -> '1.23 M'."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(number) < 1000 or unit == " T":
            return f"{number:.0f}" if unit == "" else f"{number:.2f}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def format_duration(seconds: float, *, digits: int = 1) -> str:
    """Seconds as '4.2 s', '3 min 20 s' or '2 h 05 min'; `digits` of less than a minute."""
    if seconds < 60:
        return f"{seconds:.{digits}f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def consecutive_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each range of consecutive ones among ascending numbers."""
    groups = itertools.groupby(enumerate(numbers), lambda entry: entry[1] - entry[0])
    ranges = [[number for _, number in group] for _, group in groups]
    return [(found[0], found[-1]) for found in ranges]


def format_ranges(numbers: Iterable[int]) -> str:
    """`0-3,7`, as schedulers take it for `--array`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in consecutive_ranges(numbers))


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes from '5GB' (decimal units, as Hugging Face has them), '500MiB' or a plain number. ValueError otherwise."""
    number = text.strip().rstrip("BbKkMmGgTtIi ")
    unit = text.strip()[len(number) :].strip().upper()
    if unit not in _UNITS or not re.fullmatch(r"\d+\.?\d*|\.\d+", number) or float(number) <= 0:
        raise ValueError(f"{text!r} is no size like 5GB or 500MiB")
    return round(float(number) * _UNITS[unit])


def parse_duration(text: str) -> float:
    """Seconds of '[D-]HH:MM:SS' or 'MM:SS', as schedulers write time limits. ValueError for anything else."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d{1,2}):(\d{2})", text)
    if not match:
        raise ValueError(f"{text!r} is no duration like 23:30:00 or 2-00:00:00")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
