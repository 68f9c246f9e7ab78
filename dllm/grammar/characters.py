"""Sets of characters, and the bytes of UTF-8 that spell them."""

from functools import cache

Ranges = list[tuple[int, int]]  # of code points, both ends included

LAST = 0x10FFFF
# All characters, one range for each number of bytes that UTF-8 takes; no surrogates.
BY_BYTES: Ranges = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, LAST)]


def both(one: Ranges, other: Ranges) -> Ranges:
    joined = others(others(one))  # no two that touch
    met = {(max(a, c), min(b, d)) for a, b in joined for c, d in other}
    return sorted((low, high) for low, high in met if low <= high)


def others(ranges: Ranges) -> Ranges:
    found, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, LAST)] if start <= LAST else found


@cache
def utf8(low: int, high: int) -> list[list[tuple[int, int]]]:
    """Ranges of bytes, one behind the other, for the characters of a range of ``BY_BYTES``."""
    for size in (6, 12, 18):
        ones = (1 << size) - 1
        if low & ~ones != high & ~ones and high > 0x7F:
            if low & ones:
                return utf8(low, low | ones) + utf8((low | ones) + 1, high)
            if high & ones != ones:
                return utf8(low, (high & ~ones) - 1) + utf8(high & ~ones, high)
    return [list(zip(chr(low).encode(), chr(high).encode(), strict=True))]
