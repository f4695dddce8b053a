from __future__ import annotations

import random
import zlib

import pytest

from pretrainkit.data.indexed.crc import combine, crc32


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0), (1, 1), (1000, 77), (3, 1 << 20), (65_536, 65_537)])
def test_the_checksum_of_a_concatenation_follows_from_its_parts(sizes: tuple[int, int]) -> None:
    a, b = (random.Random(size).randbytes(size) for size in sizes)
    assert combine(crc32(a), crc32(b), len(b)) == zlib.crc32(a + b)
