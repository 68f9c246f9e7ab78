"""CalibrateSettings: everything a calibration is made of, checked before its first step.

A run is a TOML file. With the target, the prompts and the seed it decides the weights.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from dllm.settings.checks import (
    FloatRange,
    check_fields,
    check_int,
    known_fields,
    read_toml,
    refuse,
)
from dllm.train import optimizer

HiddenStates = Literal["stored", "recomputed"]


@dataclass(frozen=True)
class DrafterShape:
    """A drafter's network; None where the target's own sizes are taken.

    Attributes:
        num_layers: transformer layers of the drafter.
        block_size: positions of a draft block, the last token included: it drafts one less.
        target_layer_ids: 0-based layers of the target whose outputs it reads, ascending; empty
            for as many as it has layers, spread evenly (``presets.spread_layers``).
        mask_token_id: stands at undecided positions; None for the tokenizer's mask token.
    """

    num_layers: int = 5
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None

    def __post_init__(self) -> None:
        check_int("drafter.num_layers", self.num_layers, 1)
        check_int("drafter.block_size", self.block_size, 2)
        for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) is not None:
                check_int(f"drafter.{name}", getattr(self, name), 1)
        if self.mask_token_id is not None:
            check_int("drafter.mask_token_id", self.mask_token_id, 0)
        layers = self.target_layer_ids
        for layer in layers:
            check_int("drafter.target_layer_ids", layer, 0)
        if list(layers) != sorted(set(layers)):
            refuse("drafter.target_layer_ids", list(layers), "ascending layers of the target")


@dataclass(frozen=True)
class CalibrateSettings:
    """One calibration.

    Attributes:
        seed: of the initial weights, the responses and the anchors.
        steps: optimizer steps in all.
        batch_size: sequences a step.
        anchors: draft blocks a sequence, each behind a random token of the response.
        gamma: draft k weighs exp(-(k - 1) / gamma) in the loss, tokens; None: block_size / 2.
        matrix_lr, vector_lr: peak learning rate of Muon and of AdamW.
        warmup_steps: linear, from 0.
        decay_from: fraction of the run after which the learning rates fall, along a cosine.
        final_lr: fraction of the peak that is left at the end.
        ema: decay of the average of the weights, which is what is evaluated and written.
        clip: largest norm of the gradient.
        responses: of the task suite: training prompts a family; of a prompt file: at most so many.
        heldout: of the task suite: held-out prompts a family; of a file: prompts kept for it.
        max_tokens: of a response.
        temperature: of the responses trained on; held-out ones are greedy.
        generate_batch: responses generated at once.
        max_length: sequences are cut to so many tokens.
        hidden_states: ``stored`` on disk once, or ``recomputed`` by the target at every step.
        evaluate_every, checkpoint_every: steps.
        threads: of the CPU; the weights depend on it in the last bits.
        drafter: the network; with ``--drafter`` that checkpoint's instead.
    """

    seed: int = 0
    steps: int = 3000
    batch_size: int = 32
    anchors: int = 16
    gamma: float | None = None
    matrix_lr: float = 0.02
    vector_lr: float = 0.003
    warmup_steps: int = 100
    decay_from: float = 0.4
    final_lr: float = 0.02
    ema: float = 0.998
    clip: float = 1.0
    responses: int = 1000
    heldout: int = 40
    max_tokens: int = 256
    temperature: float = 0.0
    generate_batch: int = 64
    max_length: int = 2048
    hidden_states: HiddenStates = "stored"
    evaluate_every: int = 500
    checkpoint_every: int = 250
    threads: int = 1
    drafter: DrafterShape = field(default_factory=DrafterShape)

    def __post_init__(self) -> None:
        check_fields(self, _AT_LEAST, _RANGES)
        if self.gamma is not None and self.gamma not in _GAMMA:
            refuse("gamma", self.gamma, str(_GAMMA))
        if self.hidden_states not in get_args(HiddenStates):
            refuse("hidden_states", self.hidden_states, " or ".join(get_args(HiddenStates)))

    @classmethod
    def load(cls, path: Path) -> "CalibrateSettings":
        """Read a TOML file.

        Raises:
            ValueError: no such file, no TOML, or a field that is unknown or out of range.
        """
        return cls.from_mapping(read_toml(path))

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "CalibrateSettings":
        """The inverse of ``to_mapping``.

        Raises:
            ValueError: a field is unknown or out of range.
        """
        values = dict(known_fields(cls, values, "the config"))
        shape = dict(known_fields(DrafterShape, values.pop("drafter", {}), "[drafter]"))
        layers = shape.pop("target_layer_ids", ())
        if not isinstance(layers, list | tuple):
            refuse("drafter.target_layer_ids", layers, "a list of layers of the target")
        drafter = DrafterShape(target_layer_ids=tuple(layers), **shape)
        return cls(drafter=drafter, **values)  # type: ignore[arg-type]

    def to_mapping(self) -> dict[str, object]:
        """Plain data, for a checkpoint and its model card."""
        return asdict(self)


_AT_LEAST = {
    "seed": 0,
    "steps": 1,
    "batch_size": 1,
    "anchors": 1,
    "warmup_steps": 0,
    "responses": 1,
    "heldout": 1,
    "max_tokens": 2,
    "generate_batch": 1,
    "max_length": 4,
    "evaluate_every": 1,
    "checkpoint_every": 1,
    "threads": 1,
}
_GAMMA = FloatRange(0, 1e6, excludes_low=True)
_RANGES = optimizer.ALLOWED | {"temperature": FloatRange(0, 10)}
