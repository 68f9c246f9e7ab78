"""Options for typed decisions: ``--additional-config '{"dllm": {"decisions": {...}}}'``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from dllm.settings.checks import FloatRange, IntRange, Values, check_fields, refuse_value

WHERE = '--additional-config: "dllm": "decisions"'
TYPES = ("predicate", "choice", "score")
MAX_SAMPLES = 16
TEMPERATURES = FloatRange(0.01, 100.0)
BY_TYPE = Values(
    lambda given: isinstance(given, Mapping) and {*given} <= {*TYPES},
    f"an object with {', '.join(TYPES)}",
)


@dataclass(frozen=True)
class DecisionOptions:
    """The ``decisions`` object of the options.

    Attributes:
        samples: canvases that a question is read on, each with its own noise; their probabilities
            are averaged. A model whose canvas begins as masks reads one, which has no noise.
        read_width: tokens of such a canvas; one that is much narrower than in training gives
            probabilities that are not worth much. At most the served canvas length is taken.
        least_mass: a question is refused if the model gives its labels less than this probability
            among all tokens.
        temperature: by type of question, what log-probabilities of labels are divided by.
    """

    samples: Annotated[int, IntRange(1, MAX_SAMPLES)] = 4
    read_width: Annotated[int, IntRange(1)] = 16
    least_mass: Annotated[float, FloatRange(0.0, 1.0)] = 0.0
    temperature: Annotated[Mapping[str, float], BY_TYPE] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, WHERE)
        for kind, value in self.temperature.items():
            if value not in TEMPERATURES:
                refuse_value(f"{WHERE}: temperature: {kind}", value, str(TEMPERATURES))
