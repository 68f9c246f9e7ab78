"""Counter-based noise: every random number is a pure function of where it is used.

The arguments are (request seed, canvas start position, denoise step, position in the canvas) and,
for the sampling noise, the token id. No generator has a state. So a request's tokens do not depend
on the other requests of its batch, on preemption, or on how often a step is recomputed.

There are two levels, because a canvas position needs one random number for its canvas token but
10^5 for its row of logits:

* Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), one block
  for each canvas position: counter = (position, denoise step, canvas start, stream), key = the
  seed's low and high word. Its words give the random tokens, and a two-word key for the row.
* `token_bits` mixes the token id with that row key into a 32-bit word. It takes three
  multiplications a token, cheap enough to be recomputed inside a pass over the logits.

All words are 32-bit values in int64 tensors, and no intermediate result overflows. So CPU, CUDA,
`torch.compile` and a Triton uint32 kernel produce identical bits. Pure tensor code: no host
synchronisation, no Python loop over requests, no tensor copied from the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# The fourth word of the counter. It makes the uses of one (seed, canvas start, denoise step,
# position) independent.
STREAM_INITIAL_CANVAS = 0
STREAM_GUMBEL = 1
STREAM_RENOISE = 2  # behind STREAM_GUMBEL: `step_noise` draws both at once
STREAM_ORDER = 3  # in which masks are replaced

_MASK32 = 0xFFFFFFFF
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
# The multipliers of triple32 (C. Wellons, "Prospecting for hash functions"), modulo 2^32 and as
# signed numbers, which fit an int32.
MIX_MULTIPLIERS = (0xED5AD4BB - 2**32, 0xAC4C1B51 - 2**32, 0x31848BAB)


# In the place of a row's key: nothing is drawn, and the row's sample is its argmax.
NO_KEY = -1


class StepNoise(NamedTuple):
    """All random numbers of one denoise step, for `R` rows of `C` canvas positions."""

    keys: Tensor  # [R, C, 2] int64: row keys for `gumbel`
    renoise_tokens: Tensor  # [R, C] int64: uniform tokens, for positions that are not accepted


def initial_canvas(seeds: Tensor, canvas_start: Tensor, width: int, vocab_size: int) -> Tensor:
    """[R, width] int64; seeds, canvas_start: [R] int64."""
    step = torch.zeros_like(canvas_start)
    return random_tokens(seeds, canvas_start, step, width, vocab_size, STREAM_INITIAL_CANVAS)


def step_noise(
    seeds: Tensor,
    canvas_start: Tensor,
    denoise_step: Tensor,
    width: int,
    vocab_size: int,
) -> StepNoise:
    """`row_keys(..., STREAM_GUMBEL)` and `random_tokens(..., STREAM_RENOISE)` from one Philox call.

    denoise_step: [R] int64, steps that the canvas has already taken.
    """
    streams = STREAM_GUMBEL + torch.arange(2, device=seeds.device).view(2, 1, 1)
    words = _position_words(seeds, canvas_start, denoise_step, width, streams)  # [4, 2, R, width]
    return StepNoise(
        keys=torch.stack((words[0, 0], words[1, 0]), dim=-1),
        renoise_tokens=_scale_to_vocab(words[0, 1], vocab_size),
    )


def row_keys(
    seeds: Tensor, canvas_start: Tensor, denoise_step: Tensor, width: int, stream: int
) -> Tensor:
    """Two 32-bit words for each canvas position: [R, width, 2] int64 in [0, 2^32).

    A position's key does not depend on `width`. Of seeds, [R] int64, the two's-complement bits are
    the key; canvas_start, denoise_step: [R] int64 in [0, 2^32).
    """
    words = _position_words(seeds, canvas_start, denoise_step, width, stream)
    return torch.stack((words[0], words[1]), dim=-1)


def random_tokens(
    seeds: Tensor,
    canvas_start: Tensor,
    denoise_step: Tensor,
    width: int,
    vocab_size: int,
    stream: int,
) -> Tensor:
    """Uniform token ids: [R, width] int64 in [0, vocab_size); arguments as in `row_keys`.

    floor(word * vocab_size / 2^32) of a 32-bit word: no probability is wrong by more than 2^-32.
    """
    words = _position_words(seeds, canvas_start, denoise_step, width, stream)
    return _scale_to_vocab(words[0], vocab_size)


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token of every row: [..., vocab_size] fp32, always finite.

    With v uniform on (0, 1), E = -log1p(-v) is a standard exponential and -log(E) a standard
    Gumbel. Large values, which decide an argmax, come from small v, where fp32 numbers are dense:
    the noise reaches 22.9 (= -log 2^-33) in fine steps. The usual form -log(-log(u)) with a 24-bit
    uniform u ends at 16.6, in steps of up to 0.7.
    """
    tokens = torch.arange(vocab_size, device=keys.device)
    return gumbel_from_bits(token_bits(keys, tokens))


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Of uniform 32-bit words: int64 in [0, 2^32) to fp32."""
    v = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def token_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """A random word for each token under a row key: [..., V] int64 in [0, 2^32).

    For one key this is a permutation of the 32-bit words: triple32, with the key's two words xor-ed
    in before and after the first multiplication. A mixer with two multiplications (lowbias32) is
    not enough: tokens whose ids differ by powers of two are sampled up to 2% too often or too
    rarely. keys: [..., 2] int64 in [0, 2^32); token_ids: [..., V] int in [0, 2^31).
    """
    return _token_words(keys, token_ids).long() & _MASK32


def _token_words(keys: Tensor, token_ids: Tensor) -> Tensor:
    """`token_bits` as int32 words: [..., V]. On AVX-512 ten times as fast as int64.

    Products wrap around modulo 2^32, as needed. Shifts of signed numbers copy the sign bit; the
    masks remove these copies.
    """
    key = keys.to(torch.int32)
    first, second, third = MIX_MULTIPLIERS
    x = token_ids.to(torch.int32) ^ key[..., 0, None]
    x = (x ^ ((x >> 17) & 0x7FFF)) * first
    x = x ^ key[..., 1, None]
    x = (x ^ ((x >> 11) & 0x1FFFFF)) * second
    x = (x ^ ((x >> 15) & 0x1FFFF)) * third
    return x ^ ((x >> 14) & 0x3FFFF)


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10, bit-exact to Random123: [4, ...] int64 in [0, 2^32), as the counter.

    The two halves of a round do the same arithmetic with different constants, so they run as one
    tensor: `even` holds words 0 and 2, `odd` words 1 and 3. The key [2, ...] is broadcast.
    """
    multiplier = _pair(_PHILOX_MULTIPLIERS, counter)
    weyl = _pair(_PHILOX_WEYL, counter)
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_PHILOX_ROUNDS):
        high, low = _multiply_high_low(multiplier, even)
        even, odd = high.flip(0) ^ odd ^ key, low.flip(0)
        key = (key + weyl) & _MASK32
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _position_words(
    seeds: Tensor, canvas_start: Tensor, denoise_step: Tensor, width: int, stream: int | Tensor
) -> Tensor:
    """The Philox block (four words) of every canvas position: [4, ..., R, width]."""
    position = torch.arange(width, device=seeds.device)
    stream = torch.zeros_like(position) + stream
    parts = (position, denoise_step[..., None], canvas_start[..., None], stream)
    counter = torch.stack(torch.broadcast_tensors(*parts))
    key = torch.stack((seeds & _MASK32, (seeds >> 32) & _MASK32))[..., None]
    # [2, R, 1], with one axis of size 1 for each leading axis of the streams
    key = key.view(2, *([1] * (counter.ndim - 3)), -1, 1)
    return philox4x32(counter, key)


def _scale_to_vocab(words: Tensor, vocab_size: int) -> Tensor:
    """floor(word * vocab_size / 2^32), exact for vocab_size < 2^31."""
    return (words * vocab_size) >> 32


def _multiply_high_low(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Of the 64-bit product of two 32-bit words, without signed overflow."""
    low_part = a * (b & 0xFFFF)  # < 2^48
    high_part = a * (b >> 16) + (low_part >> 16)  # < 2^49
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def _pair(values: tuple[int, int], like: Tensor) -> Tensor:
    """Computed on the device: CUDA graph capture allows no copy from the host."""
    index = torch.arange(2, device=like.device).view(2, *([1] * (like.ndim - 1)))
    # Not a sum of products: Inductor computes those of an arange in int32, which these exceed.
    return torch.where(index == 0, values[0], values[1])
