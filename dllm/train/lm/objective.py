"""What differs between kinds of language models in training, and what they share."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from dllm.tasks.suite import Question
from dllm.tasks.tokenizer import TOKEN_ID, encode_answer, encode_prompt
from dllm.tasks.tool_tokenizer import encode_chat
from dllm.train.lm.settings import ModelShape, TrainSettings

AnyModel = TypeVar("AnyModel", bound=PreTrainedModel)

EOS = TOKEN_ID["<eos>"]
STOPS = (EOS, TOKEN_ID["<turn|>"])
HEAD_DIM = 32
MAX_TOKENS = 128  # of an answer, in validation
# Of every config.json.
END_IDS = {
    "bos_token_id": TOKEN_ID["<bos>"],
    "eos_token_id": EOS,
    "pad_token_id": TOKEN_ID["<pad>"],
}
WEIGHTS = "model.safetensors"  # in a checkpoint directory
# Batches are padded to a multiple of so many tokens, so that few different shapes occur.
PAD_MULTIPLE = 16


class Answers(NamedTuple):
    """Answers of a model, and the mean denoise steps per block (autoregressive: always 1)."""

    texts: list[str]
    steps_per_block: float


class Objective(ABC):
    """A kind of model: how to build it, its loss, how it generates."""

    def __init__(self, settings: TrainSettings, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer

    @abstractmethod
    def build_model(self) -> PreTrainedModel:
        """A new model in fp32; only the parameters that are trained require a gradient."""

    @abstractmethod
    def loss(
        self, model: PreTrainedModel, questions: Sequence[Question], random: torch.Generator
    ) -> Tensor:
        """The loss of a batch, a scalar with a gradient."""

    @abstractmethod
    def answer(self, model: PreTrainedModel, questions: Sequence[Question], seed: int) -> Answers:
        """Answers to all questions, generated in one batch."""

    def generation_config(self) -> dict[str, object]:
        """generation_config.json: the most probable tokens unless a request says otherwise.

        Hugging Face reads ``do_sample`` of it, vLLM reads ``temperature``.
        """
        return {
            "bos_token_id": TOKEN_ID["<bos>"],
            "pad_token_id": TOKEN_ID["<pad>"],
            "eos_token_id": list(STOPS),
            "do_sample": False,
            "temperature": 0.0,
        }

    @abstractmethod
    def config(self) -> dict[str, object]:
        """config.json of the finished model."""

    @abstractmethod
    def load_start(self, path: Path) -> Mapping[str, Tensor]:
        """Initial weights from a checkpoint directory, by the names of ``build_model``.

        Raises:
            ValueError: it is of another kind.
        """

    def save_weights(self, model: PreTrainedModel, path: Path) -> None:
        """Write the weights of the finished model into a directory, in bf16, as Hugging Face does.

        ``save_pretrained`` knows which of them are shared (encoder and decoder of the diffusion
        model) and writes these once.
        """
        half = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        copy = type(model)(model.config).to(torch.bfloat16)
        copy.load_state_dict(half)
        copy.save_pretrained(path)
        for leftover in path.glob(f"{WEIGHTS}.index.json"):
            leftover.unlink()

    def new(self, kind: type[AnyModel], config: PretrainedConfig) -> AnyModel:
        """A model of a class of transformers in fp32, with weights drawn by the run's seed."""
        torch.manual_seed(self.settings.seed)
        model = kind(config)
        model.set_attn_implementation("eager")  # the fused kernel's bf16 backward is slower
        return model

    def texts(self, answers: Sequence[Sequence[int]], questions: Sequence[Question]) -> list[str]:
        """Generated answers as text, up to the first end-of-sequence token.

        With marks (special tokens) if the question has a chat.
        """
        found = []
        for tokens, question in zip(answers, questions, strict=True):
            end = list(tokens).index(EOS) if EOS in tokens else len(tokens)
            is_plain = question.chat is None
            found.append(self.tokenizer.decode(tokens[:end], skip_special_tokens=is_plain))
        return found


class Encoded(NamedTuple):
    """Questions as token ids; every answer ends with end-of-sequence."""

    prompts: list[list[int]]
    answers: list[list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, questions: Sequence[Question]) -> "Encoded":
        """Encode questions; prompts get the chat template."""
        return cls(
            [
                encode_prompt(tokenizer, question.prompt)
                if question.chat is None
                else encode_chat(tokenizer, question)
                for question in questions
            ],
            [encode_answer(tokenizer, question.answer) for question in questions],
        )


def pad_right(sequences: Sequence[Sequence[int]], value: int = EOS, length: int = 0) -> Tensor:
    """Sequences of different length as one tensor ``[B, L]``, int64, with L a multiple of 16.

    The filler is end-of-sequence, because the embedding of PAD is never trained. The caller makes
    sure that nothing attends to it.

    Args:
        length: L is at least so many tokens.
    """
    longest = max(length, *(len(sequence) for sequence in sequences))
    length = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    return torch.tensor([[*s, *[value] * (length - len(s))] for s in sequences])


def padded_vocab_size(tokenizer: Tokenizer) -> int:
    """Rows of the embedding: the size of the vocabulary, rounded up to a multiple of 64."""
    return -(-tokenizer.get_vocab_size() // 64) * 64


def layer_sizes(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, object]:
    """Sizes in config.json of a model with Qwen3's attention; a key head for two query heads."""
    return {
        "vocab_size": padded_vocab_size(tokenizer),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.hidden_size // HEAD_DIM,
        "num_key_value_heads": max(1, shape.hidden_size // (2 * HEAD_DIM)),
        "head_dim": HEAD_DIM,
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


def check_kind(path: Path, *kinds: str) -> str:
    """The architecture of a checkpoint directory, which is one of these.

    Raises:
        ValueError: it is of another one.
    """
    kind = json.loads((path / "config.json").read_text())["architectures"][0]
    if kind not in kinds:
        raise ValueError(f"{path} is a {kind}; allowed: a {' or a '.join(kinds)}.")
    return kind
