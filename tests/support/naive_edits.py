"""A reference for logit edits: what a request's parameters do to one row of logits."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from vllm import SamplingParams

UNKNOWN = None  # in place of a token that is not decided yet


def completes(word: Sequence[int], tokens: Sequence[int | None]) -> bool:
    return len(tokens) >= len(word) and list(tokens[len(tokens) - len(word) :]) == list(word)


def edited(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int | None],
    stops: Collection[int] = (),
) -> Tensor:
    """The logits ``[V]`` of the token behind ``output``, edited in the order of vLLM's sampler."""
    x = logits.clone()
    if params.allowed_token_ids:
        forbidden = torch.ones_like(x, dtype=torch.bool)
        forbidden[params.allowed_token_ids] = False
        x[forbidden] = -torch.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        x[sorted(stops)] = -torch.inf
    known = [token for token in output if token is not UNKNOWN]
    for token in sorted(set(prompt) | set(known)):
        x[token] *= 1 / params.repetition_penalty if x[token] > 0 else params.repetition_penalty
    for token in sorted(set(known)):
        x[token] -= params.frequency_penalty * known.count(token) + params.presence_penalty
    for word in params.bad_words_token_ids or ():
        *prefix, last = word
        if completes(prefix, output):
            x[last] = -torch.inf
    return x


def first_bad_word(words: Sequence[Sequence[int]], output: Sequence[int], after: int) -> int | None:
    """The first index >= ``after`` at which one of ``words`` ends in ``output``; None: nowhere."""
    for place in range(after, len(output)):
        if any(completes(word, output[: place + 1]) for word in words):
            return place
    return None
