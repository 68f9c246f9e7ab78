"""Options for typed decisions: ``--additional-config '{"dllm": {"decisions": {...}}}'``."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.settings.options import CHECKED, Count, Share

MAX_SAMPLES = 16
QuestionType = Literal["predicate", "choice", "score"]


@dataclass(frozen=True, config=CHECKED)
class DecisionOptions:
    """The ``decisions`` object of the options."""

    samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 4
    """canvases that a question is read on, each with its own noise; their probabilities are
    averaged. A model whose canvas begins as masks reads one, which has no noise"""

    read_width: Count = 16
    """positions of such a canvas, at most the served canvas length; one that is much narrower than
    in training gives probabilities that are not worth much"""

    least_mass: Share = 0.0
    """a question is refused if the model gives its labels less than this probability among all
    tokens"""

    temperature: Mapping[QuestionType, Annotated[float, Field(ge=0.01, le=100)]] = field(
        default_factory=dict
    )
    """`{"predicate": ..., "choice": ..., "score": ...}`: divides log-probabilities of labels"""
