"""Generation by Hugging Face's ``generate``, for prompts of different length."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def continue_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    filler: int,
    **options: object,
) -> list[list[int]]:
    """The tokens that follow each prompt, in one batch.

    Args:
        filler: stands in front of short prompts, where nothing attends to it, and behind answers
            that ended before others.
        options: of ``generate``.
    """
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    rows = [[filler] * pad + [*prompt] for pad, prompt in zip(pads, prompts, strict=True)]
    is_prompt = torch.arange(longest) >= torch.tensor(pads)[:, None]
    output = model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=is_prompt.long().to(model.device),
        max_new_tokens=max_tokens,
        pad_token_id=filler,
        **options,
    )
    return output[:, longest:].tolist()
