"""TrainSettings: everything that a run of ``dllm train`` is made of, from a TOML file."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.settings.checks import did_you_mean, refuse_value
from dllm.tasks.suite import GROUPS, STYLES, group_of
from dllm.train.settings import CHECKED, Count, RunSettings, Share

Objective = Literal["diffusion", "ar", "sdar", "llada2", "nemotron"]
CONFIGS = Path(__file__).parent / "configs"  # of the shipped models


@dataclass(frozen=True, config=CHECKED)
class ModelShape:
    """The sizes of the transformer, by the names of its config.json.

    Attributes:
        num_layers: diffusion: every third layer and the last one attend to everything, the others
            to a sliding window. Otherwise all attend to everything.
        canvas_length: tokens, of models with masks the block length of config.json (not ``ar``).
        sliding_window: tokens (diffusion only).
        num_experts, moe_intermediate_size: of these experts a token uses two (diffusion) or half
            of them, beside one that every token uses (llada2).
    """

    hidden_size: Count = 128
    num_layers: Count = 6
    intermediate_size: Count = 256
    num_experts: Annotated[int, Field(ge=2)] = 4
    moe_intermediate_size: Count = 64
    sliding_window: Count = 64
    canvas_length: Count = 32

    def __post_init__(self) -> None:
        # Heads of 32, and a key head for two of them.
        if self.hidden_size not in (32, 96) and self.hidden_size % 64:
            refuse_value("model.hidden_size", self.hidden_size, "32, 96 or a multiple of 64")


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class TrainSettings(RunSettings):
    """One training run of a language model; the other fields are those of ``RunSettings``.

    Attributes:
        objective: ``diffusion`` (DiffusionGemma), ``ar`` (autoregressive), ``sdar``, ``llada2`` or
            ``nemotron``.
        batch_size: questions in each step.
        canvases: noised canvases a question (diffusion only).
        prefix_loss: weight of the next-token loss on the answer (diffusion and nemotron only).
        block_lengths: tokens; every question gets one of them (sdar and llada2 only).
        wrong_tokens: share of the tokens that are not masked that is replaced by a wrong one, for
            a model that edits (sdar and llada2 only).
        families: task families of one of the ``GROUPS``, or empty for the eleven. Each group has
            its own tokenizer.
        style: how answers are written, one of ``STYLES``; None: as the families do.
        lora_rank: of the adapter that is trained in place of the weights; None: there is none.
        read_shaped: share of the canvases that are as a typed decision reads them: noise where the
            answer is, and ends behind it (diffusion only).
        focus: share of the questions that goes to families by their validation error.
        validation_questions: of each family, at every evaluation.
        model: table ``[model]``.
    """

    objective: Objective = field(kw_only=False)
    steps: Count = 12000
    batch_size: Count = 24
    decay_from: Share = 0.5
    canvases: Count = 2
    prefix_loss: Annotated[float, Field(ge=0, le=10)] = 0.3
    block_lengths: Annotated[tuple[Count, ...], Field(min_length=1)] = (32,)
    wrong_tokens: Share = 0.0
    families: tuple[str, ...] = ()
    style: str | None = None
    lora_rank: Count | None = None
    read_shaped: Share = 0.0
    focus: Share = 0.5
    validation_questions: Count = 24
    model: ModelShape = field(default_factory=ModelShape)

    def __post_init__(self) -> None:
        if self.objective == "llada2" and self.model.num_experts % 2:
            refuse_value("model.num_experts", self.model.num_experts, "even, for groups of 2")
        if self.style is not None and self.style not in STYLES:
            refuse_value("style", self.style, ", ".join(STYLES))
        allowed = GROUPS[self.group]
        for name in self.families:
            if name not in allowed:
                near = did_you_mean(name, list(allowed))
                refuse_value("families", name, f"{', '.join(allowed)}{near}")

    @property
    def group(self) -> str:
        """That of the families."""
        return group_of(self.families)
