"""CRC-32 (the one of gzip and zip) of long files whose pieces are summed apart.

The checksum of a concatenation follows from those of its parts, so workers sum what they write, and merging
datasets needs no second reading.
"""

from __future__ import annotations

from functools import lru_cache

try:  # 20 GB/s instead of 3.7 on Zen 4
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["combine", "crc32"]

POLYNOMIAL = 0xEDB88320
"""Of CRC-32, bits reversed."""


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of A + B from those of A and B and the length of B; must agree with zlib's crc32_combine."""
    return _multiply(_zeros(second_bytes), first) ^ second if second_bytes else first


def _multiply(a: int, b: int) -> int:
    """a b modulo the polynomial, over GF(2), the coefficient of x^0 in the highest of 32 bits."""
    product, bit = 0, 1 << 31
    while True:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                return product
        bit >>= 1
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1


@lru_cache(maxsize=64)
def _power_of_two(exponent: int) -> int:
    """x^(2^exponent) modulo the polynomial."""
    if exponent == 0:
        return 1 << 30
    root = _power_of_two(exponent - 1)
    return _multiply(root, root)


def _zeros(num_bytes: int) -> int:
    """x^(8 num_bytes) modulo the polynomial: what so many zero bytes do to a checksum."""
    power, exponent = 1 << 31, 3
    while num_bytes:
        if num_bytes & 1:
            power = _multiply(_power_of_two(exponent), power)
        num_bytes >>= 1
        exponent += 1
    return power
