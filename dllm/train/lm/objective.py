"""What a training run needs from a kind of model: five methods, two implementations."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dllm.tasks.suite import Question
from dllm.tasks.tokenizer import TOKEN_ID, encode_answer, encode_prompt

EOS = TOKEN_ID["<eos>"]
# Sequences of a batch are padded to a multiple of this, so that few shapes occur.
PAD_MULTIPLE = 16


class Answers(NamedTuple):
    """What a model said, and how many passes over its canvases that took (1 a token if none)."""

    texts: list[str]
    steps_per_block: float


class Objective(Protocol):
    """A kind of model: how to build it, what to minimise, how to ask it."""

    def build_model(self) -> PreTrainedModel:
        """The model before its first step, in fp32; only what is trained requires a gradient."""

    def loss(
        self, model: PreTrainedModel, questions: Sequence[Question], random: torch.Generator
    ) -> Tensor:
        """The loss of a batch, a scalar with a gradient."""

    def answer(self, model: PreTrainedModel, prompts: Sequence[str], seed: int) -> Answers:
        """Answer in one batch."""

    def generation_config(self) -> dict[str, object]:
        """generation_config.json of the finished model."""

    def config(self) -> dict[str, object]:
        """config.json of the finished model."""


class Encoded(NamedTuple):
    """Questions as tokens: prompts `[n]`, answers `[m]` that end with end-of-sequence."""

    prompts: list[list[int]]
    answers: list[list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, questions: Sequence[Question]) -> "Encoded":
        """Encode; the chat template is in the prompts."""
        return cls(
            [encode_prompt(tokenizer, question.prompt) for question in questions],
            [encode_answer(tokenizer, question.answer) for question in questions],
        )


def pad_right(sequences: Sequence[Sequence[int]], value: int = EOS) -> Tensor:
    """Sequences of different length as one tensor: `[B, L]` int64, L a multiple of 16.

    Nothing may attend to what is padded; with end-of-sequence there it does not matter that the
    embedding of PAD gets no gradient.
    """
    longest = max(len(sequence) for sequence in sequences)
    length = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    return torch.tensor([[*s, *[value] * (length - len(s))] for s in sequences])


def decode_until_end(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text before the first end-of-sequence token."""
    tokens = list(tokens)
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    return tokenizer.decode(tokens[:end], skip_special_tokens=True)


def answer_loss(logits: Tensor, ids: Tensor, is_answer: Tensor) -> Tensor:
    """Mean over the sequences of the mean next-token cross-entropy of each one's answer, in nats.

    A mean over all tokens would leave answers of two tokens next to none of the gradient.

    Args:
        logits: ``[num answer tokens, V]``, of the position in front of each answer token.
        ids: ``[B, L]``; is_answer: ``[B, L]`` bool.
    """
    losses = torch.zeros(ids.shape)
    losses[is_answer] = F.cross_entropy(logits, ids[is_answer], reduction="none")
    return (losses.sum(dim=1) / is_answer.sum(dim=1)).mean()


def answer_mask(encoded: Encoded, length: int) -> Tensor:
    """Where a batch of padded sequences holds answers: ``[B, length]`` bool."""
    position = torch.arange(length)
    start = torch.tensor([len(prompt) for prompt in encoded.prompts])[:, None]
    end = start + torch.tensor([len(answer) for answer in encoded.answers])[:, None]
    return (position >= start) & (position < end)
