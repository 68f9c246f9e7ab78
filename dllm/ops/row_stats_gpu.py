"""Row statistics on a GPU: one read of each row of logits, in Triton (defined in `row_stats`).

Tile kernel: a program reads one tile of tokens of one row, so that a single row already gives the
GPU many programs. With b = the tile's largest logit it writes

    b
    z_b = sum exp((x - b) / T)
    s_b = sum ((x - b) / T) exp((x - b) / T)

Row kernel: a program combines the tiles of one row, with m = max b and w_b = exp((b - m) / T):

    z = sum w_b z_b          s = sum w_b (s_b + z_b (b - m) / T)

It then reads two tiles again: that of the argmax, and the one that is drawn, for the token that is
drawn in it. Noise is computed there alone, for as many ids as a tile and a row's list of tiles
have. A row with NO_KEY skips the draw.

With filters these two kernels run twice. Between the runs the cutoff kernel finds each row's cutoff
(`filters`); the second run skips rows without filters.

A tile's mass is a sum in another order than the definition's, so of two tiles, or tokens, whose
noisy values differ by no more than rounding (1e-6) another one may be drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from dllm.ops.filters import RowFilters
from dllm.ops.noise import MIX_MULTIPLIERS
from dllm.ops.row_stats import FIRST_TILE, tile_width

FIRST = tl.constexpr(MIX_MULTIPLIERS[0] & 0xFFFFFFFF)
SECOND = tl.constexpr(MIX_MULTIPLIERS[1] & 0xFFFFFFFF)
THIRD = tl.constexpr(MIX_MULTIPLIERS[2] & 0xFFFFFFFF)
ID_OF_TILE = tl.constexpr(FIRST_TILE)
# One number for each row, maybe of a slice of the batch: one compiled kernel for any alignment.
OF_ROWS = ["temperature", "keys", "cutoff", "are_read", "peak", "log_z"]
OF_ROWS += ["top_ks", "top_ps", "min_ps"]
# Warps of a program. One warp for a tile of 1,024 tokens needs no barrier for its sums; a program
# of the others looks at a whole row, or writes a block of probabilities.
WARPS_OF_TILE, WARPS_OF_ROW, WARPS_OF_PROBS = 1, 8, 8
BLOCK_OF_PROBS = 2048


def row_stats_kernels(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    filters: RowFilters | None,
    are_read: Tensor | None = None,
    cap: float | None = None,
) -> list[Tensor]:
    """The fields of `RowStats` in order; `probs` is empty if `probs_dtype` is None. Of rows that
    nobody reads no logit is loaded.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and keys.is_contiguous(), (logits.stride(), keys.stride())
    width, device = tile_width(vocab_size), logits.device
    num_tiles = triton.cdiv(vocab_size, width)
    tiles = triton.next_power_of_2(num_tiles)

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    argmax, sample = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
    entropy, peak, log_z = numbers(num_rows), numbers(num_rows), numbers(num_rows)
    cutoff = torch.full((num_rows,), -torch.inf, device=device)
    probs = torch.empty(
        num_rows, vocab_size if probs_dtype else 0, dtype=probs_dtype or logits.dtype, device=device
    )
    of_tiles = [numbers(num_rows, num_tiles) for _ in range(3)]  # b, z_b, s_b
    tile_mass = numbers(num_rows, num_tiles)
    result = [argmax, sample, entropy, peak, log_z, cutoff, tile_mass, probs]
    if num_rows == 0:
        return result
    if are_read is None:  # of a tensor, too: without one Triton would compile other kernels
        are_read = torch.ones(num_rows, dtype=torch.bool, device=device)
    capped = {"CAP": cap or 0.0}
    sizes = {"TILE": width, "IS_EVEN": vocab_size % width == 0} | capped
    for is_filtered in (False, True) if filters is not None else (False,):
        if is_filtered:
            assert filters is not None
            _cutoff_kernel[(num_rows,)](
                logits, logits.stride(0), temperature, peak, log_z, of_tiles[0],
                filters.top_k, filters.top_p, filters.min_p, cutoff, vocab_size,
                num_tiles, TILES=tiles, num_warps=WARPS_OF_ROW, **sizes,
            )  # fmt: skip
        _tile_kernel[(num_rows, num_tiles)](
            logits, logits.stride(0), temperature, cutoff, are_read, *of_tiles, vocab_size,
            num_tiles, IS_FILTERED=is_filtered, num_warps=WARPS_OF_TILE, **sizes,
        )  # fmt: skip
        _row_kernel[(num_rows,)](
            logits, logits.stride(0), temperature, keys, cutoff, are_read, *of_tiles,
            argmax, sample, entropy, peak, log_z, tile_mass, vocab_size, num_tiles,
            TILES=tiles, IS_FILTERED=is_filtered,
            num_warps=WARPS_OF_ROW, **sizes,
        )  # fmt: skip
    if probs_dtype is not None:
        _probs_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK_OF_PROBS))](
            logits, logits.stride(0), temperature, peak, log_z, cutoff, probs, vocab_size,
            BLOCK=BLOCK_OF_PROBS, num_warps=WARPS_OF_PROBS, **capped,
        )  # fmt: skip
    return result


@triton.jit
def _token_bits(ids, first_key, second_key):
    """`noise.token_bits` in uint32 arithmetic, with the same bits."""
    x = ids.to(tl.uint32) ^ first_key
    x = (x ^ (x >> 17)) * FIRST
    x = x ^ second_key
    x = (x ^ (x >> 11)) * SECOND
    x = (x ^ (x >> 15)) * THIRD
    return x ^ (x >> 14)


@triton.jit
def _uniform(bits):
    """The v of `noise.gumbel_from_bits`: a uniform number in (0, 1)."""
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return tl.minimum(v, 1.0 - 5.9604644775390625e-08)  # 1 - 2^-24


@triton.jit
def _exponential(v):
    """-log1p(-v) for v in (0, 1). Below 1/16, where log(1 - v) would lose digits, the sum of
    v^k / k for k up to 7: the omitted terms are less than 2^-28 v.
    """
    series = 1.0 / 7
    series = series * v + 1.0 / 6
    series = series * v + 1.0 / 5
    series = series * v + 1.0 / 4
    series = series * v + 1.0 / 3
    series = series * v + 1.0 / 2
    series = series * v * v + v
    return tl.where(v < 0.0625, series, -tl.log(1.0 - v))


@triton.jit
def _gumbel(ids, keys, row):
    """`noise.gumbel_from_bits` of the words of ids under a row's key."""
    first = tl.load(keys + 2 * row).to(tl.uint32)
    second = tl.load(keys + 2 * row + 1).to(tl.uint32)
    return -tl.log(_exponential(_uniform(_token_bits(ids, first, second))))


if knobs.runtime.interpret:

    @triton.jit
    def _reciprocal(x):
        return 1.0 / x

else:  # one instruction, where a division that rounds correctly takes eight

    @triton.jit
    def _reciprocal(x):
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )


@triton.jit
def softcapped(x, CAP: tl.constexpr):
    """`row_stats.softcap`, in fp32; CAP 0: the logits are final. -inf becomes -CAP.

    cap tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)), without overflow at either end.
    """
    x = x.to(tl.float32)
    if CAP > 0:
        x = CAP - (2.0 * CAP) * _reciprocal(1.0 + tl.exp2(x * (2.8853900817779268 / CAP)))
    return x


@triton.jit
def _kept_logits(
    row_start, ids, vocab_size, least, CAP: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_FILTERED: tl.constexpr,
):  # fmt: skip
    """Logits in fp32; -inf behind the vocabulary, and below `least` of a filtered row."""
    if IS_EVEN:
        x = softcapped(tl.load(row_start + ids), CAP)
    else:
        is_token = ids < vocab_size
        x = softcapped(tl.load(row_start + ids, mask=is_token, other=0.0), CAP)
        x = tl.where(is_token, x, float("-inf"))
    if IS_FILTERED:
        x = tl.where(x < least, float("-inf"), x)
    return x


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _tile_kernel(
    logits, row_stride, temperature, cutoff, are_read, tile_max, tile_z, tile_s, vocab_size,
    num_tiles, TILE: tl.constexpr, CAP: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_FILTERED: tl.constexpr,
):  # fmt: skip
    """IS_FILTERED leaves out tokens below the row's cutoff, and rows without a cutoff."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(are_read + row) == 0:
        return
    least = tl.load(cutoff + row)
    if IS_FILTERED:  # noqa: SIM102 (IS_FILTERED is a constant of the compiled kernel)
        if least == float("-inf"):
            return
    ids = tile * TILE + tl.arange(0, TILE)  # [TILE], as everything below but the sums
    x = _kept_logits(logits + row * row_stride, ids, vocab_size, least, CAP, IS_EVEN, IS_FILTERED)
    largest = tl.max(x, 0)
    # A tile of -inf only: 0 instead, because -inf - -inf is NaN.
    base = tl.where(largest > float("-inf"), largest, 0.0)
    # d and e = 2^d, with log2(e) in the factor. 1 / T may overflow to inf, and inf * 0 is NaN at
    # the maximum: limited to a finite float.
    factor = tl.minimum(1.4426950408889634 / tl.load(temperature + row), 3e38)
    d = (x - base) * factor
    e = tl.exp2(d)
    place = row * num_tiles + tile
    tl.store(tile_max + place, largest)
    tl.store(tile_z + place, tl.sum(e, 0))
    # Where e = 0, d may be -inf: -inf * 0 is NaN. A NaN logit is lost here but not in z, where the
    # row kernel finds it.
    s = tl.sum(tl.where(e > 0, d * e, 0.0), 0)
    tl.store(tile_s + place, s * 0.6931471805599453)


@triton.jit
def _first_with_max(value, ids, last):
    """The lowest of ids with the largest value; `last`, which means nothing, if one is NaN.

    Not tl.argmax: Triton's interpreter fails on a block of NaN.
    """
    return tl.min(tl.where(value == tl.max(value, 0), ids, last), 0)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _row_kernel(
    logits, row_stride, temperature, keys, cutoff, are_read, tile_max, tile_z, tile_s,
    argmax, sample, entropy, peak, log_z, tile_mass, vocab_size, num_tiles,
    TILES: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_FILTERED: tl.constexpr,
):  # fmt: skip
    """tile_mass is not written over tile_z: where all warps have the same few tiles, one of them
    may read later than another writes.
    """
    row = tl.program_id(0).to(tl.int64)
    tile, inside = tl.arange(0, TILES), tl.arange(0, TILE)
    place, is_tile = row * num_tiles + tile, tile < num_tiles
    if tl.load(are_read + row) == 0:
        tl.store(argmax + row, 0)
        tl.store(sample + row, 0)
        tl.store(entropy + row, float("inf"))
        tl.store(peak + row, 0.0)
        tl.store(log_z + row, float("inf"))
        tl.store(tile_mass + place, 0.0, mask=is_tile)
        return
    least = tl.load(cutoff + row)
    if IS_FILTERED:  # noqa: SIM102 (IS_FILTERED is a constant of the compiled kernel)
        if least == float("-inf"):
            return
    maxima = tl.load(tile_max + place, mask=is_tile, other=float("-inf"))  # b of the formulas
    m, t = tl.max(maxima, 0), tl.load(temperature + row)
    base = tl.where(m > float("-inf"), m, 0.0)
    d = (maxima - base) / t
    weight = tl.exp(d)  # w_b
    mass = tl.load(tile_z + place, mask=is_tile, other=0.0) * weight
    s_of = tl.load(tile_s + place, mask=is_tile, other=0.0) * weight
    z = tl.sum(mass, 0)
    s = tl.sum(s_of + tl.where(mass > 0, mass * d, 0.0), 0)
    has_distribution = z > 0  # false if z is NaN
    tl.store(peak + row, m)
    tl.store(log_z + row, tl.where(has_distribution, tl.log(z), float("inf")))
    tl.store(entropy + row, tl.where(has_distribution, tl.maximum(tl.log(z) - s / z, 0.0),
                                     float("inf")))  # fmt: skip
    tl.store(tile_mass + place, tl.where(has_distribution, mass / z, 0.0), mask=is_tile)

    start = logits + row * row_stride
    likeliest = _first_with_max(maxima, tile, num_tiles - 1)
    ids = likeliest * TILE + inside
    x = _kept_logits(start, ids, vocab_size, least, CAP, IS_EVEN, IS_FILTERED)
    best = tl.minimum(_first_with_max(x, ids, vocab_size - 1), vocab_size - 1)
    tl.store(argmax + row, best)
    if tl.load(keys + 2 * row) >= 0:  # not NO_KEY
        noisy = tl.log(mass) + _gumbel(tile + ID_OF_TILE, keys, row)
        noisy = tl.where(mass > 0, noisy, float("-inf"))
        ids = _first_with_max(noisy, tile, num_tiles - 1) * TILE + inside
        x = _kept_logits(start, ids, vocab_size, least, CAP, IS_EVEN, IS_FILTERED)
        noisy = (x - base) / t + _gumbel(ids, keys, row)
        best = tl.minimum(_first_with_max(noisy, ids, vocab_size - 1), vocab_size - 1)
    tl.store(sample + row, best)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _cutoff_kernel(
    logits, row_stride, temperature, peak, log_z, tile_max, top_ks, top_ps, min_ps, cutoff,
    vocab_size, num_tiles, TILES: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """By bisection over all floats (see `filters`).

    A bisection passes over the row up to 32 times, but reads only tiles with a token that large.
    """
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    m, t, log_of_z = tl.load(peak + row), tl.load(temperature + row), tl.load(log_z + row)
    has_top_k = top_k < vocab_size
    is_on = has_top_k | (top_p < 1.0) | (min_p > 0.0)
    if is_on & (log_of_z < float("inf")):
        x = logits + row * row_stride
        maxima = tile_max + row * num_tiles
        floor = tl.where(min_p > 0.0, m + t * tl.log(min_p), float("-inf"))
        if has_top_k:
            # Each tile has a token as large as its maximum. Else from the smallest finite float on.
            tile = tl.arange(0, TILES)
            least = tl.min(tl.load(maxima + tile, mask=tile < num_tiles, other=float("inf")), 0)
            least = tl.where(top_k <= num_tiles, least, float("-inf"))
            low, high = _ordinal(tl.maximum(least, -3.4028234663852886e38)), _ordinal(m)
            while low < high:
                middle = low + (high - low + 1) // 2
                count, _mass = _count_and_mass(x, maxima, _from_ordinal(middle), m, t, vocab_size,
                                               num_tiles, TILE, CAP, IS_EVEN)  # fmt: skip
                low = tl.where(count >= top_k, middle, low)
                high = tl.where(count >= top_k, high, middle - 1)
            floor = tl.maximum(floor, _from_ordinal(low))
        if top_p < 1.0:
            _count, kept = _count_and_mass(
                x, maxima, floor, m, t, vocab_size, num_tiles, TILE, CAP, IS_EVEN
            )
            # All tokens below this have together less than half of the mass that may be left out.
            least = m + t * tl.log((1.0 - top_p) * kept / (2.0 * vocab_size))
            low, high = _ordinal(tl.maximum(floor, least)), _ordinal(m)
            while low < high:
                middle = low + (high - low + 1) // 2
                _count, mass = _count_and_mass(x, maxima, _from_ordinal(middle), m, t, vocab_size,
                                               num_tiles, TILE, CAP, IS_EVEN)  # fmt: skip
                low = tl.where(mass >= top_p * kept, middle, low)
                high = tl.where(mass >= top_p * kept, high, middle - 1)
            floor = tl.maximum(floor, _from_ordinal(low))
        tl.store(cutoff + row, tl.minimum(floor, m))


@triton.jit
def _count_and_mass(
    x, maxima, threshold, m, t, vocab_size, num_tiles,
    TILE: tl.constexpr, CAP: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Count of the tokens of a row that are >= threshold, and the sum of exp((x - m) / t)."""
    # [TILE], summed once at the end: a sum over the program's threads waits for all of them.
    counts = tl.zeros((TILE,), tl.int32)
    masses = tl.zeros((TILE,), tl.float32)
    for tile in range(num_tiles):
        if tl.load(maxima + tile) >= threshold:
            ids = tile * TILE + tl.arange(0, TILE)
            part = _kept_logits(x, ids, vocab_size, threshold, CAP, IS_EVEN, False)
            is_kept = (part >= threshold) & (part > float("-inf"))
            counts += is_kept.to(tl.int32)
            masses += tl.where(is_kept, tl.exp((part - m) / t), 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _ordinal(x):
    """See `filters._ordinal`."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_ordinal(ordinal):
    bits = ordinal.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _probs_kernel(
    logits, row_stride, temperature, peak, log_z, cutoff, probs, vocab_size,
    BLOCK: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """0 throughout for a row without a distribution."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    x = softcapped(tl.load(logits + row * row_stride + ids, mask=is_token, other=0.0), CAP)
    log_of_z = tl.load(log_z + row)
    d = (x - tl.load(peak + row)) / tl.load(temperature + row)
    p = tl.where(x >= tl.load(cutoff + row), tl.exp(d - log_of_z), 0.0)
    p = tl.where(log_of_z < float("inf"), p, 0.0)
    tl.store(probs + row * vocab_size + ids, p.to(probs.dtype.element_ty), mask=is_token)
