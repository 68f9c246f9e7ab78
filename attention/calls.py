"""The calls of kernels that serve a step: one, or one for causal sequences and one for the others.

In a layer with an anchored window FlashAttention serves the causal sequences alone (`choice`), if
one of them is longer than every canvas, as a prompt is: emitted blocks are not worth a second call.
Sequences of the two kinds alternate on the token axis, so both calls get all of them: first
FlashAttention, which writes every row, then our kernel, which leaves sequences of length 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dllm.attention.choice import CAUSAL, KINDS
from dllm.attention.inputs import RaggedBatch

MIXED = "mixed"  # a step with rows of both kinds, or of kinds that the host does not know


@dataclass(frozen=True)
class Call:
    is_flash: bool  # else our kernel gets it
    batch: RaggedBatch


def calls_of(
    batch: RaggedBatch,
    kind: str,
    flash: Sequence[str],
    max_query_len: int,
    shorten: Callable[[RaggedBatch], RaggedBatch] | None = None,
) -> list[Call]:
    """In order.

    Args:
        batch: as our kernel takes it. Its max_ahead is of this step.
        kind: one of ``choice.KINDS``, or MIXED. A canvas may be causal after all, as its flag says:
            an emitted block that the host does not know of yet.
        max_query_len: of this step alone, by which FlashAttention plans how it cuts keys.
        shorten: leaves out pages in front of a window (`visible_pages`).
    """
    kinds = KINDS if kind == MIXED else (kind,)
    served = [one for one in kinds if one in flash]
    has_prompt = batch.max_ahead is None or max_query_len > batch.max_ahead + 1
    if not served or (len(served) < len(kinds) and not has_prompt):
        return [Call(False, batch)]
    given = replace(batch, max_query_len=max_query_len, first_keys=None)
    if len(served) == len(kinds):
        return [Call(True, given if shorten is None else shorten(given))]
    assert served == [CAUSAL], "FlashAttention would overwrite what our kernel has computed"
    is_causal = batch.is_causal != 0
    # A canvas with one key is least work, and its rows are written again by the second call.
    given = replace(given, seq_lens=torch.where(is_causal, batch.seq_lens, 1), max_ahead=0)
    rest = replace(batch, seq_lens=torch.where(is_causal, 0, batch.seq_lens))
    return [Call(True, given), Call(False, rest)]
