"""TrainSettings: everything a training run is made of, checked before its first step.

A run is a TOML file. With the seed and the code it decides the weights: nothing else does.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from dllm.settings.checks import (
    FloatRange,
    check_fields,
    check_int,
    did_you_mean,
    known_fields,
    read_toml,
    refuse,
)
from dllm.tasks.suite import FAMILIES
from dllm.train import optimizer

Objective = Literal["diffusion", "ar"]
CONFIGS = Path(__file__).parent / "configs"  # of the shipped models


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the transformer, by the names of its config.json.

    Attributes:
        num_layers: of which every third attends to everything, the last one included; the others
            are sliding (diffusion only: all layers of an autoregressive model are full).
        canvas_length, sliding_window: tokens (diffusion only).
        num_experts, moe_intermediate_size: two experts a token are used (diffusion only).
    """

    hidden_size: int = 128
    num_layers: int = 6
    intermediate_size: int = 256
    num_experts: int = 4
    moe_intermediate_size: int = 64
    sliding_window: int = 64
    canvas_length: int = 32


@dataclass(frozen=True)
class TrainSettings:
    """One training run.

    Attributes:
        objective: ``diffusion`` or ``ar`` (autoregressive).
        seed: of the initial weights, the questions and the noise.
        steps: optimizer steps in all.
        batch_size: questions a step.
        canvases: noised canvases a question (diffusion only).
        matrix_lr, vector_lr: peak learning rate of Muon and of AdamW.
        warmup_steps: linear, from 0.
        decay_from: fraction of the run after which the learning rates fall, along a cosine.
        final_lr: fraction of the peak that is left at the end.
        ema: decay of the average of the weights, which is what is evaluated and written.
        clip: largest norm of the gradient.
        prefix_loss: weight of the next-token loss on the answer (diffusion only).
        families: task families, or empty for all.
        focus: share of the questions that goes to families by their validation error.
        evaluate_every, checkpoint_every: steps.
        validation_questions: per family, at every evaluation.
        threads: of the CPU; the weights depend on it in the last bits.
    """

    objective: Objective
    seed: int = 0
    steps: int = 12000
    batch_size: int = 24
    canvases: int = 2
    matrix_lr: float = 0.02
    vector_lr: float = 0.003
    warmup_steps: int = 100
    decay_from: float = 0.5
    final_lr: float = 0.02
    ema: float = 0.998
    clip: float = 1.0
    prefix_loss: float = 0.3
    families: tuple[str, ...] = ()
    focus: float = 0.5
    evaluate_every: int = 500
    checkpoint_every: int = 250
    validation_questions: int = 24
    threads: int = 1
    model: ModelShape = field(default_factory=ModelShape)

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            refuse("objective", self.objective, " or ".join(get_args(Objective)))
        check_fields(self, _AT_LEAST, _RANGES)
        for size in fields(ModelShape):
            check_int(f"model.{size.name}", getattr(self.model, size.name), 1)
        # Heads of 32, and a key head for two of them.
        if self.model.hidden_size not in (32, 96) and self.model.hidden_size % 64:
            refuse("model.hidden_size", self.model.hidden_size, "32, 96 or a multiple of 64")
        if self.model.num_experts < 2:
            refuse("model.num_experts", self.model.num_experts, "an integer of at least 2")
        for name in self.families:
            if name not in FAMILIES:
                known = f"{', '.join(FAMILIES)}{did_you_mean(str(name), list(FAMILIES))}"
                refuse("families", name, known)

    @classmethod
    def load(cls, path: Path) -> "TrainSettings":
        """Read a TOML file.

        Raises:
            ValueError: no such file, no TOML, or a field that is unknown or out of range.
        """
        return cls.from_mapping(read_toml(path))

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "TrainSettings":
        """The inverse of ``to_mapping``.

        Raises:
            ValueError: a field is unknown, missing or out of range.
        """
        values = dict(known_fields(cls, values, "the config"))
        shape = known_fields(ModelShape, values.pop("model", {}), "[model]")
        if "objective" not in values:
            refuse("objective", None, " or ".join(get_args(Objective)))
        families = values.pop("families", ())
        if not isinstance(families, list | tuple):
            refuse("families", families, "a list of names")
        return cls(
            model=ModelShape(**shape),
            families=tuple(families),
            **values,  # type: ignore[arg-type]
        )

    def to_mapping(self) -> dict[str, object]:
        """Plain data, for a checkpoint and its model card."""
        return asdict(self)


_AT_LEAST = {
    "seed": 0,
    "steps": 1,
    "batch_size": 1,
    "canvases": 1,
    "warmup_steps": 0,
    "evaluate_every": 1,
    "checkpoint_every": 1,
    "validation_questions": 1,
    "threads": 1,
}
_RANGES = optimizer.ALLOWED | {
    "prefix_loss": FloatRange(0, 10),
    "focus": FloatRange(0, 1),
}
