"""What a run of ``dllm train`` trains: a language model on questions that are drawn as it goes.

A subclass is a kind of model. Tensors are on torch's default device.
"""

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from dllm.tasks.suite import FAMILIES, GROUPS, Question, question, questions
from dllm.tasks.tokenizer import CHAT_TEMPLATE, TOKEN_ID, save_tokenizer, train_tokenizer
from dllm.tasks.tool_tokenizer import TOOL_CHAT_TEMPLATE, train_tool_tokenizer
from dllm.train.generate import continue_prompts
from dllm.train.lm.lora import add_adapter, write_adapter
from dllm.train.lm.objective import (
    EOS,
    MAX_POSITIONS,
    MAX_TOKENS,
    STOPS,
    Encoded,
    architecture_of,
)
from dllm.train.lm.settings import TrainSettings
from dllm.train.precision import autocast
from dllm.train.run import Learner, choices_of_step, noise_of_step
from dllm.train.run_files import WEIGHTS, write_json

AnyModel = TypeVar("AnyModel", bound=PreTrainedModel)


class Answers(NamedTuple):
    """Answers of a model, and the mean denoise steps per block (autoregressive: always 1)."""

    texts: list[str]
    steps_per_block: float


class LanguageLearner(Learner):
    """A kind of model: how to build it, its loss, how it generates, what its files hold.

    Attributes:
        description: of the kind, for a model card.
        starts_from: architectures of the checkpoints that it can take its first weights from.
        errors: validation error of each family, in [0, 1]; 1 before the first validation.
        model: only after ``begin``.
    """

    description: str
    starts_from: tuple[str, ...]
    settings: TrainSettings
    model: PreTrainedModel

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        is_tools = settings.group == "tools"
        self.template = TOOL_CHAT_TEMPLATE if is_tools else CHAT_TEMPLATE
        self.tokenizer = (
            train_tool_tokenizer() if is_tools else train_tokenizer(GROUPS[settings.group])
        )
        self.errors = dict.fromkeys(settings.families or tuple(FAMILIES), 1.0)

    @abstractmethod
    def build_model(self) -> PreTrainedModel:
        """A new model in fp32; only the parameters that are trained require a gradient."""

    @abstractmethod
    def config(self) -> dict[str, object]:
        """config.json of the finished model."""

    @abstractmethod
    def loss_of(self, model: Any, questions: Sequence[Question], random: torch.Generator) -> Tensor:
        """The loss of a batch, a scalar with a gradient."""

    @abstractmethod
    def answer(self, model: Any, questions: Sequence[Question], seed: int) -> Answers:
        """Answers to all questions, generated in one batch."""

    def load_start(self, path: Path) -> Mapping[str, Tensor]:
        """Weights of a checkpoint of a kind in ``starts_from``, by the names of ``build_model``."""
        return type(self.model).from_pretrained(path, dtype=torch.float32).state_dict()

    def begin(self, start_from: Path | None = None) -> Self:
        """Build the model, with weights that are drawn, or those of a checkpoint directory.

        Raises:
            ValueError: the checkpoint is of another kind or shape.
        """
        self.model = self.build_model()
        if start_from is None:
            if self.settings.lora_rank:
                raise ValueError("an adapter needs a model; give its checkpoint directory.")
            return self
        kind = architecture_of(start_from)
        if kind not in self.starts_from:
            allowed = " or a ".join(self.starts_from)
            raise ValueError(f"{start_from} is a {kind}; allowed: a {allowed}.")
        try:
            self.model.load_state_dict(self.load_start(start_from))
        except RuntimeError as error:
            raise ValueError(
                f"{start_from} has other sizes than [model] of the config; give the config that "
                f"has its sizes, or another checkpoint. {error}"
            ) from None
        if self.settings.lora_rank:
            add_adapter(self.model, self.settings.lora_rank)
        return self

    def new(self, kind: type[AnyModel], config: PretrainedConfig) -> AnyModel:
        """A model of a class of transformers in fp32, with weights drawn by the run's seed."""
        torch.manual_seed(self.settings.seed)
        model = kind(config)
        model.set_attn_implementation("eager")  # the fused kernel's bf16 backward is slower
        return model

    def loss(self, step: int) -> Tensor:
        """``loss_of`` fresh questions."""
        device = torch.get_default_device()
        noise = noise_of_step(self.settings, step, device)
        with autocast(device):
            return self.loss_of(self.model, self.draw_questions(step), noise)

    def draw_questions(self, step: int) -> list[Question]:
        """A batch; a share ``focus`` of it is from families that still go wrong."""
        settings = self.settings
        rng = choices_of_step(settings, step)
        names = list(self.errors)
        # A family that is always right still gets one part in a hundred of the focus.
        by_error = [error + 0.01 for error in self.errors.values()]
        total = sum(by_error)
        weights = [
            (1 - settings.focus) / len(names) + settings.focus * error / total for error in by_error
        ]
        return [
            question(family, "train", rng.getrandbits(48), settings.seed).in_style(settings.style)
            for family in rng.choices(names, weights, k=settings.batch_size)
        ]

    def evaluate(self, average: PreTrainedModel) -> dict[str, float]:
        """Ask validation questions: denoise steps per block, and the accuracy of each family."""
        steps_per_block = []
        for family in self.errors:
            asked = questions([family], "validation", self.settings.validation_questions)
            answers = self.answer(average, asked, self.settings.seed)
            styled = [question.in_style(self.settings.style) for question in asked]
            pairs = zip(styled, answers.texts, strict=True)
            self.errors[family] = 1 - sum(q.is_correct(text) for q, text in pairs) / len(asked)
            steps_per_block.append(answers.steps_per_block)
        return {
            "steps_per_block": round(sum(steps_per_block) / len(steps_per_block), 2),
            **{family: round(1 - error, 4) for family, error in self.errors.items()},
        }

    def answer_causally(self, model: PreTrainedModel, questions: Sequence[Question]) -> list[str]:
        """Greedy answers of an autoregressive model."""
        prompts = Encoded.of(self.tokenizer, questions).prompts
        rows = continue_prompts(model, prompts, MAX_TOKENS, EOS, do_sample=False, eos_token_id=EOS)
        return self.texts(rows, questions)

    def texts(self, answers: Sequence[Sequence[int]], questions: Sequence[Question]) -> list[str]:
        """Generated answers as text, up to the first end-of-sequence token.

        With marks (special tokens) if the question has a chat.
        """
        found = []
        for tokens, asked in zip(answers, questions, strict=True):
            end = list(tokens).index(EOS) if EOS in tokens else len(tokens)
            is_plain = asked.chat is None
            found.append(self.tokenizer.decode(tokens[:end], skip_special_tokens=is_plain))
        return found

    def summary(self) -> str:
        """Accuracy over all families at the last validation."""
        return f"validation {1 - sum(self.errors.values()) / len(self.errors):.1%}"

    def state(self) -> dict[str, Any]:
        """The errors, which decide what is asked next."""
        return {"errors": self.errors}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self.errors = state["errors"]

    def write(self, average: PreTrainedModel, path: Path) -> None:
        """Write bf16 safetensors, config, generation config, tokenizer and chat template.

        Of a run with ``lora_rank``: the adapter alone.
        """
        path.mkdir(parents=True, exist_ok=True)
        if self.settings.lora_rank:
            write_adapter(average, self.settings.lora_rank, path)
            return
        self.save_weights(average, path)
        write_json(path / "config.json", self.config())
        write_json(path / "generation_config.json", self.generation_config())
        save_tokenizer(self.tokenizer, path, MAX_POSITIONS, self.template)

    def save_weights(self, average: PreTrainedModel, path: Path) -> None:
        """As Hugging Face does, which knows which weights are shared and writes these once."""
        copy.deepcopy(average).to(torch.bfloat16).save_pretrained(path)
        (path / WEIGHTS).chmod(0o644)  # safetensors writes it readable by its owner only

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
