"""Row statistics on a GPU: one read of each row of logits, in Triton (defined in `row_stats`).

Block kernel: a program reads one block of tokens of one row, so that a single row already gives the
GPU many programs. With b = the block's largest logit it writes

    b, the lowest id with it, and the id that wins the block's draw
    z_b = sum exp((x - b) / T)
    s_b = sum ((x - b) / T) exp((x - b) / T)

Merge kernel: a program combines the blocks of one row, with m = max b and w_b = exp((b - m) / T):

    z = sum w_b z_b          s = sum w_b (s_b + z_b (b - m) / T)

The draw needs argmax(d + gumbel), where gumbel = -log(E) and E = -log1p(-v) is a standard
exponential of the uniform v. That is argmin(E / exp(d)), which saves one of the two logarithms.
exp(d) is known already, and v <= E <= v / (1 - v), so the token with the smallest v / exp(d) is
nearly always the winner. E is computed for all tokens only if another token comes so close that it
could win. Each block reports its winning token; the merge kernel recomputes d + gumbel for those
few with the formula of the definition and takes the largest. Only within a block may two tokens
whose values differ by no more than rounding (1e-6 nats) swap. A row with NO_KEY skips all this.

With filters these two kernels run twice. Between the runs the cutoff kernel finds each row's cutoff
(`filters`); the second run skips rows without filters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm.ops.filters import RowFilters
from dllm.ops.noise import MIX_MULTIPLIERS

FIRST = tl.constexpr(MIX_MULTIPLIERS[0] & 0xFFFFFFFF)
SECOND = tl.constexpr(MIX_MULTIPLIERS[1] & 0xFFFFFFFF)
THIRD = tl.constexpr(MIX_MULTIPLIERS[2] & 0xFFFFFFFF)
# One number for each row, maybe of a slice of the batch: one compiled kernel for any alignment.
OF_ROWS = ["temperature", "keys", "cutoff", "peak", "log_z", "top_ks", "top_ps", "min_ps"]


@dataclass(frozen=True)
class KernelTiles:
    """How the kernels cut a row; powers of two. No result depends on it."""

    # Tokens of a program. 8 tokens a thread leave enough registers for two programs at a time.
    block: int = 2048
    num_warps: int = 8


def row_stats_kernels(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    filters: RowFilters | None,
    cut: KernelTiles,
) -> list[Tensor]:
    """The fields of `RowStats` in order; `probs` is empty if `probs_dtype` is None.

    `tile_mass` has no tiles: only the CPU's soft embedding reads it.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and keys.is_contiguous(), (logits.stride(), keys.stride())
    num_blocks, device = triton.cdiv(vocab_size, cut.block), logits.device

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    argmax, sample = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
    entropy, peak, log_z = numbers(num_rows), numbers(num_rows), numbers(num_rows)
    cutoff = torch.full((num_rows,), -torch.inf, device=device)
    probs = torch.empty(
        num_rows, vocab_size if probs_dtype else 0, dtype=probs_dtype or logits.dtype, device=device
    )
    result = [argmax, sample, entropy, peak, log_z, cutoff, numbers(num_rows, 0), probs]
    if num_rows == 0:
        return result
    block_max, block_z, block_s = (numbers(num_rows, num_blocks) for _ in range(3))
    block_argmax, block_winner = (
        torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device) for _ in range(2)
    )
    for is_filtered in (False, True) if filters is not None else (False,):
        if is_filtered:
            assert filters is not None
            _cutoff_kernel[(num_rows,)](
                logits, logits.stride(0), temperature, peak, log_z, block_max,
                filters.top_k, filters.top_p, filters.min_p, cutoff, vocab_size,
                num_blocks, BLOCK=cut.block, num_warps=cut.num_warps,
            )  # fmt: skip
        _block_kernel[(num_rows, num_blocks)](
            logits, logits.stride(0), temperature, keys, cutoff,
            block_max, block_argmax, block_z, block_s, block_winner, vocab_size, num_blocks,
            BLOCK=cut.block, IS_FILTERED=is_filtered, num_warps=cut.num_warps,
        )  # fmt: skip
        _merge_kernel[(num_rows,)](
            logits, logits.stride(0), temperature, keys, cutoff,
            block_max, block_argmax, block_z, block_s, block_winner,
            argmax, sample, entropy, peak, log_z, vocab_size, num_blocks,
            BLOCKS=triton.next_power_of_2(num_blocks), IS_FILTERED=is_filtered, num_warps=4,
        )  # fmt: skip
    if probs_dtype is not None:
        _probs_kernel[(num_rows, num_blocks)](
            logits, logits.stride(0), temperature, peak, log_z, cutoff, probs, vocab_size,
            BLOCK=cut.block, num_warps=cut.num_warps,
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
    """-log1p(-v) for v in (0, 1).

    Below 1/16, where log(1 - v) would lose digits, the sum of v^k / k for k up to 7. The omitted
    terms are less than 2^-28 v there, below fp32 rounding.
    """
    series = 1.0 / 7
    series = series * v + 1.0 / 6
    series = series * v + 1.0 / 5
    series = series * v + 1.0 / 4
    series = series * v + 1.0 / 3
    series = series * v + 1.0 / 2
    series = series * v * v + v
    return tl.where(v < 0.0625, series, -tl.log(1.0 - v))


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _block_kernel(
    logits, row_stride, temperature, keys, cutoff,
    block_max, block_argmax, block_z, block_s, block_winner, vocab_size, num_blocks,
    BLOCK: tl.constexpr, IS_FILTERED: tl.constexpr,
):  # fmt: skip
    """The statistics of one block of one row (top of the file).

    IS_FILTERED: tokens below the row's cutoff are left out; rows without a cutoff are skipped.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    least = tl.load(cutoff + row)
    if IS_FILTERED:  # noqa: SIM102 (IS_FILTERED is a constant of the compiled kernel)
        if least == float("-inf"):
            return
    ids = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK], as everything below but the sums
    x = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    x = x.to(tl.float32)
    if IS_FILTERED:
        x = tl.where(x < least, float("-inf"), x)
    largest = tl.max(x, 0)
    # A block of -inf only: 0 instead, because -inf - -inf is NaN.
    base = tl.where(largest > float("-inf"), largest, 0.0)
    # 1 / T may overflow to inf, and inf * 0 is NaN at the maximum: limited to a finite float.
    d = (x - base) * tl.minimum(1.0 / tl.load(temperature + row), 3e38)
    e = tl.exp(d)
    z = tl.sum(e, 0)
    # Where e = 0, d may be -inf: -inf * 0 is NaN. A NaN logit is lost here but not in z, where the
    # merge kernel finds it.
    s = tl.sum(tl.where(e > 0, d * e, 0.0), 0)

    inside = tl.arange(0, BLOCK)
    first_key = tl.load(keys + 2 * row)
    winner = tl.full((), 0, tl.int32)
    if first_key >= 0:  # not NO_KEY
        v = _uniform(_token_bits(ids, first_key.to(tl.uint32),
                                 tl.load(keys + 2 * row + 1).to(tl.uint32)))  # fmt: skip
        lower = tl.where(e > 0, v / e, float("inf"))  # at most E / e, the value to minimize
        smallest = tl.min(lower, 0)
        winner = tl.min(tl.where(lower == smallest, inside, BLOCK), 0)  # place in the block
        its_v = tl.sum(tl.where(inside == winner, v, 0.0), 0)
        # E / e of this token, with a margin for rounding. A token that beats it has a smaller
        # E / e, so its v / e, which is no larger, is below this limit too. `rivals` counts the
        # token itself.
        limit = smallest * (_exponential(its_v) / its_v) * 1.0001
        rivals = tl.sum((lower <= limit).to(tl.int32), 0)
        if rivals > 1:
            value = tl.where(lower <= limit, _exponential(v) / e, float("inf"))
            winner = tl.min(tl.where(value == tl.min(value, 0), inside, BLOCK), 0)

    place = row * num_blocks + block
    tl.store(block_max + place, largest)
    # Not tl.argmax: Triton's interpreter fails on a block of NaN.
    tl.store(block_argmax + place, tl.min(tl.where(x == largest, ids, vocab_size), 0))
    tl.store(block_z + place, z)
    tl.store(block_s + place, s)
    tl.store(block_winner + place, block * BLOCK + winner)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _merge_kernel(
    logits, row_stride, temperature, keys, cutoff,
    block_max, block_argmax, block_z, block_s, block_winner,
    argmax, sample, entropy, peak, log_z, vocab_size, num_blocks,
    BLOCKS: tl.constexpr, IS_FILTERED: tl.constexpr,
):  # fmt: skip
    """The statistics of one row from those of its blocks."""
    row = tl.program_id(0).to(tl.int64)
    if IS_FILTERED:  # noqa: SIM102 (IS_FILTERED is a constant of the compiled kernel)
        if tl.load(cutoff + row) == float("-inf"):
            return
    block = tl.arange(0, BLOCKS)  # [BLOCKS]
    is_block = block < num_blocks
    place = row * num_blocks + block
    maxima = tl.load(block_max + place, mask=is_block, other=float("-inf"))  # b of the formulas
    m = tl.max(maxima, 0)
    base = tl.where(m > float("-inf"), m, 0.0)
    t = tl.load(temperature + row)
    d = (maxima - base) / t
    weight = tl.exp(d)  # w_b
    z_of = tl.load(block_z + place, mask=is_block, other=0.0) * weight
    s_of = tl.load(block_s + place, mask=is_block, other=0.0) * weight
    z = tl.sum(z_of, 0)
    s = tl.sum(s_of + tl.where(z_of > 0, z_of * d, 0.0), 0)
    has_distribution = z > 0  # false if z is NaN
    tl.store(peak + row, m)
    tl.store(log_z + row, tl.where(has_distribution, tl.log(z), float("inf")))
    tl.store(entropy + row, tl.where(has_distribution, tl.maximum(tl.log(z) - s / z, 0.0),
                                     float("inf")))  # fmt: skip

    first = tl.argmax(tl.where(maxima == m, 1, 0), 0)
    likeliest = _valid(tl.load(block_argmax + row * num_blocks + first), vocab_size)
    tl.store(argmax + row, likeliest)
    first_key = tl.load(keys + 2 * row)
    if first_key < 0:  # NO_KEY
        tl.store(sample + row, likeliest)
    else:
        ids = _valid(tl.load(block_winner + place, mask=is_block, other=0), vocab_size)
        x = tl.load(logits + row * row_stride + ids, mask=is_block, other=float("-inf"))
        v = _uniform(_token_bits(ids, first_key.to(tl.uint32),
                                 tl.load(keys + 2 * row + 1).to(tl.uint32)))  # fmt: skip
        # [BLOCKS], d + gumbel of the winners
        noisy = (x.to(tl.float32) - base) / t - tl.log(_exponential(v))
        noisy = tl.where(is_block & (maxima > float("-inf")), noisy, float("-inf"))
        chosen = tl.argmax(noisy, 0)
        tl.store(sample + row, tl.sum(tl.where(block == chosen, ids, 0), 0))


@triton.jit
def _valid(ids, vocab_size):
    """`ids` limited to the vocabulary: in a row with a NaN they may lie outside."""
    return tl.minimum(tl.maximum(ids, 0), vocab_size - 1)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _cutoff_kernel(
    logits, row_stride, temperature, peak, log_z, block_max, top_ks, top_ps, min_ps, cutoff,
    vocab_size, num_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest kept logit of one row, by bisection over all floats (see `filters`).

    A bisection passes over the row up to 32 times, but reads only blocks with a token that large.
    """
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    m, t, log_of_z = tl.load(peak + row), tl.load(temperature + row), tl.load(log_z + row)
    has_top_k = top_k < vocab_size
    is_on = has_top_k | (top_p < 1.0) | (min_p > 0.0)
    if is_on & (log_of_z < float("inf")):
        x = logits + row * row_stride
        maxima = block_max + row * num_blocks
        floor = tl.where(min_p > 0.0, m + t * tl.log(min_p), float("-inf"))
        if has_top_k:
            # From the smallest finite float to the largest logit. m - m is 0 in the type of m.
            low, high = _ordinal(m - m - 3.4028234663852886e38), _ordinal(m)
            while low < high:
                middle = low + (high - low + 1) // 2
                count, _mass = _count_and_mass(x, maxima, _from_ordinal(middle), m, t,
                                               vocab_size, num_blocks, BLOCK)  # fmt: skip
                low = tl.where(count >= top_k, middle, low)
                high = tl.where(count >= top_k, high, middle - 1)
            floor = tl.maximum(floor, _from_ordinal(low))
        if top_p < 1.0:
            _count, kept = _count_and_mass(x, maxima, floor, m, t, vocab_size, num_blocks, BLOCK)
            # Below m - 104 t the probability is 0 in fp32.
            low, high = _ordinal(tl.maximum(floor, m - 104.0 * t)), _ordinal(m)
            while low < high:
                middle = low + (high - low + 1) // 2
                _count, mass = _count_and_mass(x, maxima, _from_ordinal(middle), m, t,
                                               vocab_size, num_blocks, BLOCK)  # fmt: skip
                low = tl.where(mass >= top_p * kept, middle, low)
                high = tl.where(mass >= top_p * kept, high, middle - 1)
            floor = tl.maximum(floor, _from_ordinal(low))
        tl.store(cutoff + row, tl.minimum(floor, m))


@triton.jit
def _count_and_mass(x, maxima, threshold, m, t, vocab_size, num_blocks, BLOCK: tl.constexpr):
    """Count of the tokens of a row that are >= threshold, and the sum of their exp((x - m) / t)."""
    count = 0
    mass = 0.0
    for block in range(num_blocks):
        if tl.load(maxima + block) >= threshold:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            part = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
            is_kept = (part >= threshold) & (part > float("-inf"))
            count += tl.sum(is_kept.to(tl.int32), 0)
            mass += tl.sum(tl.where(is_kept, tl.exp((part - m) / t), 0.0), 0)
    return count, mass


@triton.jit
def _ordinal(x):
    """Maps floats to integers in the same order (see `filters._ordinal`)."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_ordinal(ordinal):
    bits = ordinal.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _probs_kernel(
    logits, row_stride, temperature, peak, log_z, cutoff, probs, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    """The probabilities of one block of one row; 0 throughout for a row without a distribution."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    x = tl.load(logits + row * row_stride + ids, mask=is_token, other=float("-inf"))
    x = x.to(tl.float32)
    log_of_z = tl.load(log_z + row)
    d = (x - tl.load(peak + row)) / tl.load(temperature + row)
    p = tl.where(x >= tl.load(cutoff + row), tl.exp(d - log_of_z), 0.0)
    p = tl.where(log_of_z < float("inf"), p, 0.0)
    tl.store(probs + row * vocab_size + ids, p.to(probs.dtype.element_ty), mask=is_token)
