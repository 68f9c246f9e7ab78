"""The two copies of a question and its answer that a model of masked blocks is trained on.

Positions are cut into blocks of B tokens, counted from the start of the sequence or from another
place (the origin). The *clean* copy is the sequence itself; the *noised* copy holds the blocks with
answer tokens, some of them replaced by MASK. One forward pass over both, side by side, shows every
noised block what generation shows a canvas: the clean tokens before it, and itself (M. Arriola et
al., Block Diffusion, 2025, https://arxiv.org/abs/2503.09573, section 4.2). A clean block sees the
clean blocks before it and itself, as emitted blocks and prompts do. Where these are causal, a clean
token sees the clean tokens before it and itself.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dllm.train.lm.objective import Encoded, pad_right


class TwoCopies(NamedTuple):
    """N sequences as S = L + M tokens: L of the clean copy, M of the noised one.

    A sequence ends with its last block; the rest of this block is end-of-sequence, and so is what
    fills up shorter sequences.

    Attributes:
        ids: ``[N, L]`` int64, the clean copy.
        clean: ``[N, M]`` int64, the tokens that the noised copy stands for.
        positions: ``[N, S]`` int64, of both copies.
        is_noised: ``[S]`` bool, which columns are the noised copy.
        is_target: ``[N, M]`` bool, the positions of answers; not those of the prompt's tail, which
            shares a block with the answer, and not the filler of shorter sequences.
        block_lengths: ``[N]`` int64, B of each sequence.
        origins: ``[N]`` int64, the position that blocks are counted from.
        is_causal: whether a clean token sees none behind it.
    """

    ids: Tensor
    clean: Tensor
    positions: Tensor
    is_noised: Tensor
    is_target: Tensor
    block_lengths: Tensor
    origins: Tensor
    is_causal: bool

    @classmethod
    def of(
        cls,
        encoded: Encoded,
        block_lengths: Tensor,
        origins: Tensor | None = None,
        is_causal: bool = False,
    ) -> "TwoCopies":
        """Lay out encoded questions, each with a block length of its own.

        Args:
            origins: ``[N]`` int64, inside the answers; what stands before one is in no block. None:
                the start of each sequence.
        """
        prompt_len = torch.tensor([len(prompt) for prompt in encoded.prompts])
        answer_len = torch.tensor([len(answer) for answer in encoded.answers])
        if origins is None:
            origins = torch.zeros_like(prompt_len)
        first = torch.maximum(prompt_len, origins)
        begin = first - (first - origins) % block_lengths
        last = prompt_len + answer_len - 1
        end = last - (last - origins) % block_lengths + block_lengths
        ids = pad_right(encoded.sequences, length=int(end.max()))
        noised = begin[:, None] + torch.arange(int((end - begin).max()))
        clean_positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
        return cls(
            ids,
            ids.gather(1, noised.clamp(max=ids.shape[1] - 1)),
            torch.cat((clean_positions, noised), dim=1),
            torch.arange(ids.shape[1] + noised.shape[1]) >= ids.shape[1],
            (noised >= first[:, None]) & (noised < end[:, None]),
            block_lengths,
            origins,
            is_causal,
        )

    @property
    def target_blocks(self) -> Tensor:
        """The block of each noised token: ``[N, M]`` int64."""
        behind = self.positions[:, self.is_noised] - self.origins[:, None]
        return behind // self.block_lengths[:, None]

    def visible(self) -> Tensor:
        """Which keys a query sees: ``[N, S, S]`` bool (rows are queries)."""
        position, length = self.positions, self.block_lengths[:, None]
        start = position - (position - self.origins[:, None]) % length  # of a token's block
        clean_end = position + 1 if self.is_causal else start + length
        end = torch.where(self.is_noised, start, clean_end)  # of the clean copy that a query sees
        of_clean = position[:, None, :] < end[:, :, None]
        of_noised = self.is_noised[:, None] & (start[:, None, :] == start[:, :, None])
        return torch.where(self.is_noised[None, :], of_noised, of_clean)
