"""What a run of ``dllm train`` trains: a language model on questions that are drawn as it goes.

Tensors are on torch's default device.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dllm.tasks.suite import FAMILIES, Question, question, questions
from dllm.train.lm.objective import WEIGHTS, Objective
from dllm.train.lm.settings import TrainSettings
from dllm.train.run import Learner, choices_of_step, noise_of_step


class LanguageLearner(Learner):
    """A model of one objective.

    Attributes:
        errors: validation error of each family, in [0, 1]; 1 before the first validation.
    """

    settings: TrainSettings

    def __init__(
        self, settings: TrainSettings, objective: Objective, start_from: Path | None = None
    ) -> None:
        """Build the model.

        Args:
            start_from: a checkpoint directory with the initial weights; None draws them.

        Raises:
            ValueError: the checkpoint is of another kind or shape.
        """
        self.settings, self.objective = settings, objective
        self.errors = dict.fromkeys(settings.families or tuple(FAMILIES), 1.0)
        self.model: PreTrainedModel = objective.build_model()
        self._is_evaluated = False
        if start_from is not None:
            load_start(self.model, objective, start_from)

    def loss(self, step: int) -> Tensor:
        """That of the objective, on fresh questions."""
        device = torch.get_default_device()
        noise = noise_of_step(self.settings, step, device)
        with torch.autocast(device.type, torch.bfloat16):
            return self.objective.loss(self.model, self.draw_questions(step), noise)

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
            question(family, "train", rng.getrandbits(48), settings.seed)
            for family in rng.choices(names, weights, k=settings.batch_size)
        ]

    def evaluate(self, average: PreTrainedModel) -> dict[str, float]:
        """Ask validation questions: denoise steps per block, and the accuracy of each family."""
        steps_per_block = []
        for family in self.errors:
            asked = questions([family], "validation", self.settings.validation_questions)
            answers = self.objective.answer(average, asked, self.settings.seed)
            pairs = zip(asked, answers.texts, strict=True)
            self.errors[family] = 1 - sum(q.is_correct(text) for q, text in pairs) / len(asked)
            steps_per_block.append(answers.steps_per_block)
        self._is_evaluated = True
        return {
            "steps_per_block": round(sum(steps_per_block) / len(steps_per_block), 2),
            **{family: round(1 - error, 4) for family, error in self.errors.items()},
        }

    def summary(self) -> str:
        """Accuracy over all families."""
        accuracy = 1 - sum(self.errors.values()) / len(self.errors)
        return f"validation {accuracy:.1%}" if self._is_evaluated else "validation -"

    def state(self) -> dict[str, Any]:
        """The errors, which decide what is asked next."""
        return {"errors": self.errors, "is_evaluated": self._is_evaluated}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self.errors, self._is_evaluated = state["errors"], state["is_evaluated"]


def load_start(model: PreTrainedModel, objective: Objective, start_from: Path) -> None:
    """Give a model the weights of a checkpoint of the same kind and shape.

    Raises:
        ValueError: it is of another kind or shape.
    """
    start = objective.load_start(start_from)
    for name, tensor in model.state_dict().items():
        has, wants = tuple(start[name].shape) if name in start else None, tuple(tensor.shape)
        if has != wants:
            raise ValueError(
                f"{start_from} has {name} of shape {has}, [model] of the config makes it {wants}; "
                "give the config that has its sizes, or another checkpoint."
            )
    model.load_state_dict(start)


def digest_of(checkpoint: Path) -> str:
    """SHA-256 of the weights of a checkpoint directory."""
    return hashlib.sha256((checkpoint / WEIGHTS).read_bytes()).hexdigest()
