"""TrainSettings: everything that a run of ``dllm train`` is made of, from a TOML file."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from dllm.settings.checks import FloatRange, check_int, did_you_mean, refuse_value
from dllm.tasks.suite import GROUPS, group_of
from dllm.train.settings import RunSettings

Objective = Literal["diffusion", "ar", "sdar", "llada2"]
CONFIGS = Path(__file__).parent / "configs"  # of the shipped models


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the transformer, by the names of its config.json.

    Attributes:
        num_layers: diffusion: every third layer and the last one attend to everything, the others
            to a sliding window. Otherwise all attend to everything.
        canvas_length: tokens, of SDAR and LLaDA2 the block length of config.json (not ``ar``).
        sliding_window: tokens (diffusion only).
        num_experts, moe_intermediate_size: of these experts a token uses two (diffusion) or half
            of them, beside one that every token uses (llada2).
    """

    hidden_size: int = 128
    num_layers: int = 6
    intermediate_size: int = 256
    num_experts: int = 4
    moe_intermediate_size: int = 64
    sliding_window: int = 64
    canvas_length: int = 32


@dataclass(frozen=True, kw_only=True)
class TrainSettings(RunSettings):
    """One training run of a language model; the other fields are those of ``RunSettings``.

    Attributes:
        objective: ``diffusion`` (DiffusionGemma), ``ar`` (autoregressive), ``sdar`` or ``llada2``.
        batch_size: questions in each step.
        canvases: noised canvases a question (diffusion only).
        prefix_loss: weight of the next-token loss on the answer (diffusion only).
        block_lengths: tokens; every question gets one of them (sdar and llada2 only).
        wrong_tokens: share of the tokens that are not masked that is replaced by a wrong one, for
            a model that edits (sdar and llada2 only).
        families: task families of one of the ``GROUPS``, or empty for the eleven. Each group has
            its own tokenizer.
        read_shaped: share of the canvases that are as a typed decision reads them: noise where the
            answer is, and ends behind it (diffusion only).
        focus: share of the questions that goes to families by their validation error.
        validation_questions: of each family, at every evaluation.
        model: table ``[model]``.
    """

    objective: Objective = field(kw_only=False)
    steps: int = 12000
    batch_size: int = 24
    decay_from: float = 0.5
    canvases: int = 2
    prefix_loss: float = 0.3
    block_lengths: tuple[int, ...] = (32,)
    wrong_tokens: float = 0.0
    families: tuple[str, ...] = ()
    read_shaped: float = 0.0
    focus: float = 0.5
    validation_questions: int = 24
    model: ModelShape = field(default_factory=ModelShape)

    AT_LEAST = RunSettings.AT_LEAST | {"canvases": 1, "validation_questions": 1}
    RANGES = RunSettings.RANGES | {
        "prefix_loss": FloatRange(0, 10),
        "wrong_tokens": FloatRange(0, 1),
        "focus": FloatRange(0, 1),
        "read_shaped": FloatRange(0, 1),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in fields(ModelShape):
            check_int(f"model.{size.name}", getattr(self.model, size.name), 1)
        # Heads of 32, and a key head for two of them.
        if self.model.hidden_size not in (32, 96) and self.model.hidden_size % 64:
            refuse_value("model.hidden_size", self.model.hidden_size, "32, 96 or a multiple of 64")
        if self.model.num_experts < 2:
            refuse_value("model.num_experts", self.model.num_experts, "an integer of at least 2")
        if self.objective == "llada2" and self.model.num_experts % 2:
            refuse_value(
                "model.num_experts", self.model.num_experts, "an even integer, for groups of 2"
            )
        if not self.block_lengths:
            refuse_value("block_lengths", self.block_lengths, "at least one block length")
        for index, length in enumerate(self.block_lengths):
            check_int(f"block_lengths[{index}]", length, 1)
        allowed = GROUPS[self.group]
        for name in self.families:
            if name not in allowed:
                near = did_you_mean(str(name), list(allowed))
                refuse_value("families", name, f"{', '.join(allowed)}{near}")

    @property
    def group(self) -> str:
        """That of the families."""
        return group_of(self.families)
