"""What a denoise step needs to know about each row of logits, defined once.

For a row of logits x, soft-capped here if they are not so yet (`softcap`), at temperature T, with
d = (x - max x) / T, z = sum exp(d), s = sum d exp(d):

    argmax   = the lowest id with the largest x
    sample   = one exact draw from softmax(x / T), in two steps (below);
               the argmax of a row whose key is NO_KEY
    entropy  = log z - s / z              nats, of softmax(x / T)
    probs    = exp(d) / z                 what self-conditioning embeds

The temperature divides differences from the maximum, never the logits themselves: as T -> 0, x / T
overflows (or loses the maximum by rounding), while d is exactly 0 at the maximum and goes to -inf
elsewhere. The entropy is never negative: log z >= 0 >= s. Filters (`filters`) exclude tokens before
all this: x is -inf there.

The draw. The vocabulary is cut into tiles of `tile_width` tokens, whose masses m = sum exp(d) are
sums on the way to z. By Gumbel-max, first a tile is drawn, then a token of it:

    tile     = argmax over the tiles of log m + gumbel(FIRST_TILE + tile)
    sample   = argmax over the tokens of that tile of d + gumbel(token)

The noise is of both ids under the row's key (`noise.token_bits`). P(tile) P(token | tile) =
(m / z) (exp(d) / m) = exp(d) / z, so the distribution is the one that a single argmax over all
tokens has. But noise is computed for V / width + width ids, and not for V: of 262,144 tokens 1,280.
The width is a part of the definition: another one draws other tokens.

`reference_row_stats` is this definition in plain torch operations; it also runs on a CPU if the
vocabulary is small. `row_stats_cpu` and the kernels of `row_stats_gpu` read a row once from memory
and write nothing of its size, unless the probabilities are asked for, which take a second pass.
vLLM's `diffusion_gemma_sampler.py` (0.32) computes the same numbers on a GPU; it differs in the
noise (one seed for a whole batch, a number for each token), in the filters (applied to a copy of
all the logits) and in a row without a finite logit, where its entropy is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dllm.ops.noise import NO_KEY, gumbel_from_bits, token_bits

FIRST_TILE = 2**30  # the noise's id of the first tile; those of tokens are below
# Up to this size a vocabulary is cut into narrow tiles, about as many as they have tokens.
SMALL_VOCABULARY = 1024
NARROW, WIDE = 32, 1024


def tile_width(vocab_size: int) -> int:
    """The last tile may have fewer."""
    return NARROW if vocab_size <= SMALL_VOCABULARY else WIDE


class RowStats(NamedTuple):
    """Statistics of `N` rows over a vocabulary of `V` tokens, which is cut into tiles.

    The probability of a token is exp((x - peak) / temperature - log_z) where x >= cutoff, else 0.
    """

    argmax: Tensor  # [N] int64, ties go to the lowest id
    sample: Tensor  # [N] int64, drawn from softmax(logits / temperature)
    entropy: Tensor  # [N] fp32, nats, >= 0; +inf marks a row that has no distribution
    peak: Tensor  # [N] fp32, the largest logit
    log_z: Tensor  # [N] fp32, log of z; +inf for a row that has no distribution
    cutoff: Tensor  # [N] fp32, the smallest logit that the filters keep; -inf without one
    tile_mass: Tensor  # [N, tiles] fp32, the probability of each tile
    probs: Tensor | None  # [N, V] in the dtype asked for


def reference_row_stats(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    cutoff: Tensor | None = None,
    cap: float | None = None,
) -> RowStats:
    """Arguments as of `dispatch.row_stats`, with cutoffs [N] in the place of filters. Needs memory
    for several tensors of [N, V].
    """
    x = softcap(logits, cap)  # [N, V]
    cutoff = torch.full_like(temperature, -torch.inf) if cutoff is None else cutoff
    x = torch.where(x < cutoff[:, None], -torch.inf, x)
    vocab_size = x.shape[1]
    argmax, peak = x.argmax(dim=-1), x.amax(dim=-1)
    x = tiles_of(x)  # [N, tiles, width]
    d = (x - peak[:, None, None]) / temperature[:, None, None]
    e = torch.exp(d)
    mass = e.sum(dim=-1)  # [N, tiles]
    z = mass.sum(dim=-1)
    # Where e = 0, d may be -inf: -inf * 0 is NaN.
    s = torch.where(e > 0, d * e, 0.0).sum(dim=(-2, -1))
    has_distribution = z > 0  # false if d is NaN: all logits -inf (-inf - -inf), or one is NaN
    log_z = torch.where(has_distribution, torch.log(z), torch.inf)
    drawn = drawn_tokens(x, mass, peak, temperature, keys).clamp(max=vocab_size - 1)
    probs = torch.where(has_distribution[:, None, None], e / z[:, None, None], 0.0)
    probs = probs.flatten(1)[:, :vocab_size]
    return RowStats(
        argmax=argmax,
        sample=torch.where(keys[:, 0] == NO_KEY, argmax, drawn),
        entropy=torch.where(has_distribution, log_z - s / z, torch.inf),
        peak=peak,
        log_z=log_z,
        cutoff=cutoff,
        tile_mass=torch.where(has_distribution[:, None], mass / z[:, None], 0.0),
        probs=None if probs_dtype is None else probs.to(probs_dtype),
    )


def softcap(logits: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(logits / cap)`` in fp32; without a cap the logits themselves."""
    x = logits.float()
    return x if cap is None else torch.tanh(x / cap) * cap


def tiles_of(logits: Tensor) -> Tensor:
    """[N, V] to [N, tiles, width] fp32, -inf after the vocabulary; a view where possible."""
    vocab_size = logits.shape[-1]
    width = tile_width(vocab_size)
    x = logits.float()
    if vocab_size % width:
        x = F.pad(x, (0, -vocab_size % width), value=-torch.inf)
    return x.view(len(x), -1, width)


def drawn_tokens(
    x: Tensor, mass: Tensor, peak: Tensor, temperature: Tensor, keys: Tensor
) -> Tensor:
    """The draw of each row: [N] int64; any id of the tiles in a row without a distribution.

    Args:
        x: [N, tiles, width] fp32, logits.
        mass: [N, tiles], the sum of exp((x - peak) / temperature) over each tile.
    """
    num_tiles, width = x.shape[1:]
    ids = FIRST_TILE + torch.arange(num_tiles, device=x.device)
    tile = (torch.log(mass) + gumbel_from_bits(token_bits(keys, ids))).argmax(dim=-1)  # [N]
    inside = x.gather(1, tile[:, None, None].expand(-1, 1, width))[:, 0]  # [N, width]
    ids = tile[:, None] * width + torch.arange(width, device=x.device)
    noisy = (inside - peak[:, None]) / temperature[:, None] + gumbel_from_bits(
        token_bits(keys, ids)
    )
    return tile * width + noisy.argmax(dim=-1)
