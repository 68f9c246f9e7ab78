"""Arrays as bytes, for files and pipes; nothing in them is ever run."""

import io
import zlib
from collections.abc import Sequence

import numpy as np

# The first byte of what a process answers that compiles.
TABLE, REFUSAL, OUT_OF_MEMORY = b"T", b"R", b"M"


def pack(arrays: Sequence[np.ndarray]) -> bytes:
    """Compressed, with a checksum."""
    stream = io.BytesIO()
    for array in arrays:
        np.save(stream, array, allow_pickle=False)
    return zlib.compress(stream.getvalue(), level=1)


def unpack(packed: bytes, count: int) -> list[np.ndarray]:
    """What `pack` made of ``count`` arrays. Raises ValueError for anything else."""
    try:
        stream = io.BytesIO(zlib.decompress(packed))
        arrays = [np.load(stream, allow_pickle=False) for _ in range(count)]
    except (zlib.error, EOFError) as error:
        raise ValueError(f"damaged arrays: {error}") from error
    if stream.read(1):
        raise ValueError(f"more than {count} arrays")
    return arrays
