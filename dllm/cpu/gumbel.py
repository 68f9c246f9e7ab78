"""The random numbers of vLLM's sampling kernels, and the argmax per block of the vocabulary.

The numbers equal the kernels' to the bit, so that a seed gives the same tokens. Gumbel noise comes
from a murmur3 hash of (seed, position, token).
"""

import numpy as np

_WORD = 0xFFFFFFFF

# Added to the position by vLLM's own drafters (`_DRAFT_NOISE_SALT` in its gumbel.py), whose drafts
# must not share the noise of the target. Ours have to, and do not ask for it.
DRAFT_NOISE_SALT = 1 << 30

# How many logits get their noise at once: so few that temporaries stay in the cache of the CPU.
DRAWN_AT_ONCE = 1 << 16


def _rotate(words: np.ndarray, bits: int) -> np.ndarray:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


def _murmur3_mix(state: np.ndarray, key: np.ndarray) -> np.ndarray:
    key = _rotate(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate(state ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def murmur3(
    seeds: np.ndarray, positions: np.ndarray, keys: np.ndarray, domain: int = 0
) -> np.ndarray:
    """As `murmur3_hash32` in vLLM's gumbel.py: [rows, n] uint32.

    seeds, positions: [rows] int64; keys: [n] uint32, token ids. Another domain gives other bits.
    """
    state: np.ndarray = np.full((len(seeds), 1), domain, dtype=np.uint32)
    for words in (seeds, seeds >> 32, positions):
        state = _murmur3_mix(state, (words & _WORD).astype(np.uint32)[:, None])
    state = _murmur3_mix(state, keys) ^ np.uint32(16)
    state = (state ^ (state >> 16)) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> 13)) * np.uint32(0xC2B2AE35)
    return state ^ (state >> 16)


def _log1p_of_negated(value: np.ndarray) -> np.ndarray:
    """Return log(1 - value) in fp32; below 1/4 by the same series as vLLM's kernel."""
    series: np.ndarray = np.array(1 / 8, dtype=np.float32)
    for divisor in range(7, 0, -1):
        series = np.float32(1 / divisor) + value * series
    direct = np.log(np.maximum(np.float32(1) - value, np.float32(2**-24)))
    return np.where(value < 0.25, -value * series, direct)


def gumbel_noise(
    seeds: np.ndarray, positions: np.ndarray, num_tokens: int, use_fp64: bool
) -> np.ndarray:
    """[rows, num_tokens] fp32 or fp64; seeds, positions: [rows] int64.

    With a uniform u the noise is -log(-log(u)), and large noise, which decides the winner, needs u
    close to 1, where fp32 numbers are far apart. The fp32 draw uses -log(-log(1 - u)) instead:
    large noise comes from u close to 0, where they are dense.
    """
    keys = np.arange(num_tokens, dtype=np.uint32)
    low = murmur3(seeds, positions, keys)
    if use_fp64:
        high = murmur3(seeds, positions, keys, domain=0x9E3779B9)
        bits = ((high.astype(np.uint64) << 32) | low) >> 11
        uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
        return -np.log(-np.log(np.minimum(uniform, 1 - 2.0**-53)))
    uniform32 = (low >> 16).astype(np.float32) * np.float32(2**-16)
    uniform32 += ((low & 0xFFFF).astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return -np.log(-_log1p_of_negated(uniform32))


def drawn_at_once(rows: np.ndarray, vocab_size: int) -> list[np.ndarray]:
    """Row numbers in arrays so short that temporaries for their logits stay small."""
    at_once = max(1, DRAWN_AT_ONCE // vocab_size)
    return np.split(rows, range(at_once, len(rows), at_once)) if len(rows) else []


def vocab_blocks(values: np.ndarray, block_size: int) -> np.ndarray:
    """Cut `values` [..., V] into the kernels' vocabulary blocks, [..., blocks, block size].

    The kernels reduce each block to one value. vLLM allocates the buffers of these values and
    reduces them itself, so there have to be as many. The last block is filled up with -inf; if
    there is only one, it has the size of the vocabulary.
    """
    vocab_size = values.shape[-1]
    if vocab_size <= block_size:
        return values[..., None, :]
    num_blocks = -(-vocab_size // block_size)
    padded = np.full((*values.shape[:-1], num_blocks * block_size), -np.inf, dtype=values.dtype)
    padded[..., :vocab_size] = values
    return padded.reshape(*values.shape[:-1], num_blocks, block_size)


def best_per_block(values: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The token of the largest value of each block, and that value: both [..., blocks]."""
    blocks = vocab_blocks(values, block_size)
    best = blocks.argmax(-1)
    rows = blocks.reshape(-1, blocks.shape[-1])
    largest = rows[np.arange(len(rows)), best.reshape(-1)].reshape(best.shape)
    return np.arange(blocks.shape[-2]) * block_size + best, largest
