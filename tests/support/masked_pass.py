"""transformers' models that fill in masks: a pass without a cache, and greedy decoding by it."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm.models.unmasking.reference import additive, block_causal

# Which of the masks with these probabilities get their token in a step; the argument behind them is
# the number of steps before it.
Choose = Callable[[Tensor, int], list[int]]


def logits_of(
    model: Any, ids: list[int], start: int, block_size: int = 1, is_shifted: bool = False
) -> Tensor:
    """Logits ``[L, V]``: causal over blocks, and the tokens from ``start`` on see all of them.

    Shifted ones come back at the tokens that they predict.
    """
    (logits,) = logits_of_all(model, [ids], [start], block_size)
    return torch.cat([logits[:1], logits[:-1]]) if is_shifted else logits


@torch.no_grad()
def logits_of_all(
    model: Any, rows: Sequence[list[int]], starts: Sequence[int], block_size: int = 1
) -> list[Tensor]:
    """The same for many sequences in one pass; nothing sees what pads the shorter ones behind."""
    longest = max(map(len, rows))
    at, lengths = torch.arange(longest), torch.tensor([len(ids) for ids in rows])
    sees_all = at >= torch.tensor(starts)[:, None]
    seen = block_causal(at, block_size) | sees_all[:, :, None]
    mask = additive(seen & (at < lengths[:, None])[:, None])
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in rows])
    logits = model(input_ids=padded, attention_mask=mask, use_cache=False).logits
    return [of_row[: len(ids)] for of_row, ids in zip(logits, rows, strict=True)]


def random_prompts(lengths: Iterable[int], seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(20, 800, (length,), generator=draw).tolist() for length in lengths]


def surest(counts: list[int]) -> Choose:
    """So many of the surest in each step."""
    return lambda p, step: p.argsort(descending=True, stable=True)[: counts[step]].tolist()


def sure(threshold: float) -> Choose:
    """All that are sure, and the surest one in any case."""
    return lambda p, step: [i for i in range(len(p)) if p[i] >= threshold or i == int(p.argmax())]


class Answer(NamedTuple):
    """Two canvases behind a prompt, and the steps that they took."""

    tokens: list[int]
    steps: int


def decoded(
    model: Any,
    prompts: Sequence[list[int]],
    size: int,
    mask: int,
    choose: Choose,
    block_size: int = 1,
    begins_causally: bool = False,
) -> list[Answer]:
    """Two canvases of masks behind each prompt, all prompts in one batch.

    Args:
        size: tokens of a canvas; of the first one it is the rest of the prompt's last block.
        begins_causally: the first token of a canvas is that of the causal pass in front of it.
    """
    rows, steps = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(2):
        starts, firsts = [len(ids) for ids in rows], [mask] * len(rows)
        if begins_causally:
            for row, logits in enumerate(logits_of_all(model, rows, starts)):
                logits[-1, mask] = -torch.inf
                firsts[row] = int(logits[-1].argmax())
        for ids, first in zip(rows, firsts, strict=True):
            ids += [first, *[mask] * (size - len(ids) % block_size - 1)]
        for step in itertools.count():
            left = [row for row, ids in enumerate(rows) if mask in ids]
            if not left:
                break
            given = [rows[row] for row in left], [starts[row] for row in left]
            for row, logits in zip(left, logits_of_all(model, *given, block_size), strict=True):
                _replace_masks(rows[row], logits, mask, choose, step)
                steps[row] += 1
    answers = [ids[len(prompt) :] for ids, prompt in zip(rows, prompts, strict=True)]
    return [Answer(*each) for each in zip(answers, steps, strict=True)]


def _replace_masks(ids: list[int], logits: Tensor, mask: int, choose: Choose, step: int) -> None:
    logits[:, mask] = -torch.inf
    masks = [at for at, token in enumerate(ids) if token == mask]
    p, tokens = logits[masks].softmax(dim=-1).max(dim=-1)
    for chosen in choose(p, step):
        ids[masks[chosen]] = int(tokens[chosen])
