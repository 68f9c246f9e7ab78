"""Questions as tensors, and the parts of losses and configs that kinds of models share."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from dllm.tasks.suite import Question
from dllm.tasks.tokenizer import TOKEN_ID, encode_answer, encode_prompt
from dllm.tasks.tool_tokenizer import encode_chat
from dllm.train.lm.settings import ModelShape

EOS = TOKEN_ID["<eos>"]
STOPS = (EOS, TOKEN_ID["<turn|>"])
HEAD_DIM = 32
MAX_POSITIONS = 4096
MAX_TOKENS = 128  # of an answer, in validation
# Batches are padded to a multiple of so many tokens, so that few different shapes occur.
PAD_MULTIPLE = 16
TAIL_WEIGHT = 0.1  # in the loss of a block, of a position behind the first end-of-sequence token
PURE_NOISE = 0.3  # share of blocks that are noise throughout


class Encoded(NamedTuple):
    """Questions as token ids; every answer ends with end-of-sequence."""

    prompts: list[list[int]]
    answers: list[list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, questions: Sequence[Question]) -> "Encoded":
        """Encode questions; prompts get the chat template."""
        prompts = [
            encode_prompt(tokenizer, question.prompt)
            if question.chat is None
            else encode_chat(tokenizer, question)
            for question in questions
        ]
        return cls(prompts, [encode_answer(tokenizer, question.answer) for question in questions])

    @property
    def sequences(self) -> list[list[int]]:
        """Each prompt with its answer behind it."""
        return [prompt + answer for prompt, answer in zip(*self, strict=True)]


def pad_right(sequences: Sequence[Sequence[int]], length: int = 0) -> Tensor:
    """Sequences of different length as one tensor ``[B, L]``, int64, with L a multiple of 16.

    The filler is end-of-sequence, because the embedding of PAD is never trained. The caller makes
    sure that nothing attends to it.

    Args:
        length: L is at least so many tokens.
    """
    longest = max(length, *(len(sequence) for sequence in sequences))
    length = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    return torch.tensor([[*s, *[EOS] * (length - len(s))] for s in sequences])


def padded_vocab_size(tokenizer: Tokenizer) -> int:
    """Rows of the embedding: the size of the vocabulary, rounded up to a multiple of 64."""
    return -(-tokenizer.get_vocab_size() // 64) * 64


def common_config(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, object]:
    """Fields in config.json of a model with Qwen3's attention; a key head for two query heads."""
    return {
        "dtype": "bfloat16",
        "vocab_size": padded_vocab_size(tokenizer),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.hidden_size // HEAD_DIM,
        "num_key_value_heads": max(1, shape.hidden_size // (2 * HEAD_DIM)),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": TOKEN_ID["<bos>"],
        "eos_token_id": EOS,
        "pad_token_id": TOKEN_ID["<pad>"],
    }


def answer_loss(logits: Tensor, ids: Tensor, is_answer: Tensor) -> Tensor:
    """Next-token cross-entropy of each answer, averaged over its tokens, then over answers; nats.

    A mean over all tokens of the batch would give short answers hardly any weight.

    Args:
        logits: ``[num answer tokens, V]``: what each answer token is predicted from.
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


def tail_weights(clean: Tensor, is_target: Tensor | bool = True) -> Tensor:
    """Weights of positions in the loss: 1, and ``TAIL_WEIGHT`` behind the first end-of-sequence.

    Args:
        clean: ``[N, C]``, the right tokens.
        is_target: ``[N, C]`` bool, where an end-of-sequence counts as one.
    """
    is_end = ((clean == EOS) & is_target).int()
    return torch.where(is_end.cumsum(dim=1) > is_end, TAIL_WEIGHT, 1.0)


def architecture_of(path: Path) -> str:
    """The architecture of a checkpoint directory."""
    architecture: str = json.loads((path / "config.json").read_text())["architectures"][0]
    return architecture
