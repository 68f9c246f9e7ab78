"""What instructions this processor has, by Linux's names."""

from functools import cache
from pathlib import Path

FACTS = Path("/proc/cpuinfo")
# Instructions that multiply bf16 matrices: on x86 (two kinds) and on Arm.
BF16 = {"amx_bf16", "avx512_bf16", "bf16"}


@cache
def flags() -> frozenset[str]:
    """Empty where nothing says so."""
    text = FACTS.read_text() if FACTS.exists() else ""
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(
        flag
        for key, _, value in lines
        if key.strip() in ("flags", "Features")
        for flag in value.split()
    )


def computes_bf16() -> bool:
    """A CPU that has to convert bf16 numbers first is several times faster in fp32."""
    return bool(BF16 & flags())
