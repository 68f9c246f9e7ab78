"""Arrays as bytes, for pipes and requests; nothing in them is ever run."""

import io
import zlib
from collections.abc import Sequence

import numpy as np

# The first byte of what a process answers that compiles.
TABLE, REFUSAL, OUT_OF_MEMORY = b"T", b"R", b"M"


def pack(arrays: Sequence[np.ndarray]) -> bytes:
    """The arrays in order, compressed."""
    stream = io.BytesIO()
    np.savez(stream, *arrays)
    return zlib.compress(stream.getvalue(), level=1)


def unpack(packed: bytes) -> list[np.ndarray]:
    """What `pack` was given."""
    with np.load(io.BytesIO(zlib.decompress(packed)), allow_pickle=False) as arrays:
        return list(arrays.values())
