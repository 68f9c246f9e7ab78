"""Drafts from the request's own text: what stood behind the same tokens before.

Text repeats itself: quotations, names, code, lists, and a small model that goes round in circles.
The longest end of a text that also stands further in front is looked up, and what followed it there
is drafted. If the latter reaches the end of the text, it goes on from its beginning.

Known as prompt lookup (A. Saxena, 2023) or n-gram drafts.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.v1.worker.gpu.states import RequestState

# A match of m tokens is expected to go on with probability m / (m + DOUBT). In English pages, cut
# into words, 14, 34, 47 and 50 % of the matches of 1, 2, 3 and 4 words went on.
DOUBT = 4
WINDOW = 2048  # tokens at the end of a text that are searched
LONGEST = 16  # a longer match counts as one of so many tokens
# Values that are no token: in front of a text, in front of the windows, and of a suffix.
NO_TEXT, NO_WINDOW, NO_SUFFIX = -1, -2, -3


class Lookup(NamedTuple):
    """What is drafted for R rows.

    Attributes:
        tokens: ``[R, N]`` int64.
        lengths: ``[R]`` int64, of the match: 0 to LONGEST; without one the tokens mean nothing.
    """

    tokens: Tensor
    lengths: Tensor

    def confidence(self, end_ids: Tensor) -> Tensor:
        """``[R, N]`` fp32: how likely each draft is kept, if those in front of it are.

        Args:
            end_ids: tokens that end an answer; 0 for these, because verifying them gains nothing.
        """
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        matched = self.lengths[:, None] + places
        is_useful = (self.lengths[:, None] > 0) & ~torch.isin(self.tokens, end_ids)
        return torch.where(is_useful, matched / (matched + DOUBT), 0.0)


def lookup_of(states: RequestState, slots: Tensor, longest: int, num_drafts: int) -> Lookup:
    """Drafts of the requests in ``slots`` ``[R]``: what followed their last tokens before. No wait.

    Args:
        longest: no text has more tokens.
    """
    slots = slots.long()
    lens = states.total_len.gpu[slots].long()
    texts = last_tokens(states.all_token_ids.gpu[:, :longest], slots, lens)
    return look_up(texts, num_drafts)


def last_tokens(all_token_ids: Tensor, slots: Tensor, lens: Tensor) -> Tensor:
    """The end of some texts, at most WINDOW tokens: ``[R, W]``, NO_TEXT in front of a shorter one.

    Args:
        all_token_ids: ``[slots, longest]`` int32.
        slots, lens: ``[R]``, which texts, and their lengths.
    """
    size = min(WINDOW, all_token_ids.shape[1])
    places = lens[:, None] - size + torch.arange(size, device=lens.device)
    found = all_token_ids[slots[:, None], places.clamp(min=0)]
    return torch.where(places >= 0, found, NO_TEXT)


def look_up(texts: Tensor, num_drafts: int) -> Lookup:
    """Look up the end of each text in itself; of equally long matches the last. No wait.

    Args:
        texts: ``[R, W]``, from ``last_tokens``.
    """
    size = texts.shape[1]
    ends = F.pad(texts, (LONGEST, 0), value=NO_SUFFIX)[:, None, -LONGEST:]
    ends = torch.where(ends < 0, NO_SUFFIX, ends)
    # [R, W - 1, LONGEST]: the tokens that end at each place but the last.
    windows = F.pad(texts, (LONGEST - 1, 0), value=NO_WINDOW).unfold(1, LONGEST, 1)[:, :-1]
    is_equal = (windows == ends).flip(-1)
    matched = is_equal.to(torch.uint8).cumprod(-1, dtype=torch.uint8).sum(-1)  # [R, W - 1]
    places = torch.arange(size - 1, device=texts.device)
    place = (matched * size + places).argmax(-1)
    lengths = matched.gather(1, place[:, None])[:, 0]
    behind = torch.arange(num_drafts, device=texts.device) % (size - 1 - place)[:, None]
    return Lookup(texts.gather(1, place[:, None] + 1 + behind).long(), lengths)
