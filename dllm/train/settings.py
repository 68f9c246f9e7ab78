"""Settings of a training run: read from a TOML file, checked before the first step."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from dllm.settings.checks import FloatRange, check_fields, known_fields, read_toml, refuse_value
from dllm.settings.command import CommandError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What every run has, whatever it trains; a subclass adds the rest and may change defaults.

    A field whose type is a dataclass is a table of the TOML file. Together with the run's inputs
    the settings decide the weights.

    Attributes:
        seed: of everything random.
        steps: optimizer steps in all.
        batch_size: training examples in each step.
        matrix_lr, vector_lr: peak learning rate of Muon and of AdamW.
        warmup_steps: the learning rates grow linearly over so many steps.
        decay_from: fraction of the run after which the learning rates fall, along a cosine.
        final_lr: fraction of the peak that is left at the end.
        ema: decay of the average of the weights, which is what is evaluated and written.
        clip: largest norm of the gradient.
        evaluate_every, checkpoint_every: steps.
        threads: of the CPU; the last bits of the weights depend on it.
    """

    seed: int = 0
    steps: int
    batch_size: int
    matrix_lr: float = 0.02
    vector_lr: float = 0.003
    warmup_steps: int = 100
    decay_from: float
    final_lr: float = 0.02
    ema: float = 0.998
    clip: float = 1.0
    evaluate_every: int = 500
    checkpoint_every: int = 250
    threads: int = 1

    # The smallest value of an integer, and the range of a number, by field.
    AT_LEAST: ClassVar[dict[str, int]] = {
        "seed": 0,
        "steps": 1,
        "batch_size": 1,
        "warmup_steps": 0,
        "evaluate_every": 1,
        "checkpoint_every": 1,
        "threads": 1,
    }
    RANGES: ClassVar[dict[str, FloatRange]] = {
        "matrix_lr": FloatRange(0, 1, excludes_low=True),
        "vector_lr": FloatRange(0, 1, excludes_low=True),
        "decay_from": FloatRange(0, 1),
        "final_lr": FloatRange(0, 1),
        "ema": FloatRange(0, 0.99999),
        "clip": FloatRange(0, 1e6, excludes_low=True),
    }

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                refuse_value(name, getattr(self, name), " or ".join(get_args(hint)))
        check_fields(self, self.AT_LEAST, self.RANGES)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file.

        Raises:
            CommandError: no such file, no TOML, or a field is unknown or out of range.
        """
        try:
            return cls.from_mapping(read_toml(path))
        except ValueError as error:
            raise CommandError(f"{path}: {error}") from None

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """The inverse of ``to_mapping``.

        Raises:
            ValueError: a field is unknown, missing or out of range.
        """
        return _read(cls, values)

    def to_mapping(self) -> dict[str, object]:
        """Plain data, for a checkpoint and its model card."""
        return dataclasses.asdict(self)


def _read(kind: type[T], given: object, table: str = "") -> T:
    """A dataclass from a table of a TOML file and the tables in it; "" is the whole file."""
    where, prefix = (f"[{table}]", f"{table}.") if table else ("the config", "")
    values: dict[str, Any] = dict(known_fields(kind, given, where))
    hints = get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        name, hint = field.name, hints[field.name]
        if name not in values:
            if field.default is field.default_factory is dataclasses.MISSING:
                values[name] = None  # which the checks of ``kind`` refuse by name
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            values[name] = _read(hint, values[name], name)
        elif get_origin(hint) is tuple:
            if not isinstance(values[name], list | tuple):
                refuse_value(prefix + name, values[name], "a list")
            values[name] = tuple(values[name])
    return kind(**values)
