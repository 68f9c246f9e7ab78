"""Settings of a training run: read from a TOML file, checked before the first step.

The checks are pydantic's: a type or a bound of a field is all there is to write.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dllm.settings.checks import did_you_mean, read_toml
from dllm.settings.command import CommandError

CHECKED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
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

    seed: Annotated[int, Field(ge=0)] = 0
    steps: Count
    batch_size: Count
    matrix_lr: Rate = 0.02
    vector_lr: Rate = 0.003
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    decay_from: Share
    final_lr: Share = 0.02
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.998
    clip: Annotated[float, Field(gt=0)] = 1.0
    evaluate_every: Count = 500
    checkpoint_every: Count = 250
    threads: Count = 1

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
            ValueError: a field is unknown, missing or out of range; names the first such field.
        """
        try:
            # By way of JSON, which has no tuples: there, lists are taken for them.
            return TypeAdapter(cls).validate_json(json.dumps(values, default=str))
        except ValidationError as error:
            raise ValueError(in_words(cls, error)) from None

    def to_mapping(self) -> dict[str, object]:
        """Plain data, for a checkpoint and its model card."""
        return dataclasses.asdict(self)


def in_words(kind: type, error: ValidationError) -> str:
    """The first mistake: the field, what was given, what is allowed."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{name} is missing."
    if first["type"] == "unexpected_keyword_argument":
        known = _names(kind)
        return f"no option {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}."
    allowed = first["msg"].removeprefix("Input should be ")
    return f"{name} = {first['input']!r}; allowed: {allowed}."


def _names(kind: type) -> list[str]:
    """All fields of a dataclass; those of a table as ``table.field``."""
    found = []
    for field in dataclasses.fields(kind):
        is_table = isinstance(field.type, type) and dataclasses.is_dataclass(field.type)
        found += [f"{field.name}.{n}" for n in _names(field.type)] if is_table else [field.name]  # type: ignore[arg-type]
    return found
