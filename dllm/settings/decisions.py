"""Options for typed decisions: ``--additional-config '{"dllm": {"decisions": {...}}}'``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dllm.settings.checks import FloatRange, check_int, known_fields, refuse_value

WHERE = '--additional-config: "dllm": "decisions"'
TYPES = ("predicate", "choice", "score")
MAX_SAMPLES = 16
TEMPERATURES = FloatRange(0.01, 100.0)
MASSES = FloatRange(0.0, 1.0)


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

    samples: int = 4
    read_width: int = 16
    least_mass: float = 0.0
    temperature: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_int(f"{WHERE}: samples", self.samples, 1)
        check_int(f"{WHERE}: read_width", self.read_width, 1)
        if self.samples > MAX_SAMPLES:
            refuse_value(f"{WHERE}: samples", self.samples, f"at most {MAX_SAMPLES}")
        if self.least_mass not in MASSES:
            refuse_value(f"{WHERE}: least_mass", self.least_mass, str(MASSES))
        given = self.temperature
        if not isinstance(given, Mapping) or not set(given) <= set(TYPES):
            refuse_value(f"{WHERE}: temperature", given, f"an object with {', '.join(TYPES)}")
        for kind, value in given.items():
            if value not in TEMPERATURES:
                refuse_value(f"{WHERE}: temperature: {kind}", value, str(TEMPERATURES))

    @classmethod
    def from_given(cls, given: Any) -> "DecisionOptions":
        """The options from the parsed JSON object.

        Raises:
            ValueError: an unknown key (names the most similar known one) or a value out of range.
        """
        return given if isinstance(given, cls) else cls(**known_fields(cls, given, WHERE))
