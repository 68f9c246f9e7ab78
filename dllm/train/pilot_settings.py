"""PilotTraining: everything that a run of ``dllm train pilot`` is made of, from a TOML file."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.train.settings import CHECKED, Count, Rate, TomlSettings

CHECKED_ONE_IN = 5  # prompts to train on: they say when to stop
# What decides the trials; a resumed run may change the other settings.
OF_TRIALS = (
    "seed",
    "radius",
    "responses",
    "heldout",
    "temperatures",
    "max_tokens",
    "generate_batch",
)
Temperature = Annotated[float, Field(ge=0, le=10)]
Milliseconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class PilotTraining(TomlSettings):
    """One run; together with its inputs it decides the weights.

    Attributes:
        seed: of the weights, the responses and the order of the prompts.
        radius: candidates are the widths up to so many below and above the drafter's own, which is
            its block_size - 1.
        hidden_size: of the pilot, between its two layers.
        reads: the target's logits as they are (``raw``), or their ``softmax``.
        label: ``acceptance``: the width of most tokens a step, which ties share; ``tokens_per_s``:
            the time by the costs, so that a width that is nearly as fast is nearly as good.
        costs: milliseconds of a step of one request without drafts, of a draft pass, and of each
            verified draft; None: measured with vLLM, if the label needs them.
        responses: prompts to train on, at most.
        heldout: the first so many prompts, which are measured on and not trained on.
        temperatures: of the responses; the prompts take them in turn.
        max_tokens: of a response.
        generate_batch: responses generated at once.
        steps, batch_size: of the training, the latter in prompts.
        learning_rate: how far a step may move what a layer gives, at most: the rate of its weights
            is this, divided by the mean sum of what it reads.
        weight_decay: AdamW's.
        evaluate_every: steps. Every fifth prompt to train on is kept for this: what decides best
            there is written.
        threads: of the CPU; the last bits of the weights depend on it.
    """

    seed: Annotated[int, Field(ge=0)] = 0
    radius: Count = 2
    hidden_size: Count = 2048
    reads: Literal["raw", "softmax"] = "raw"
    label: Literal["acceptance", "tokens_per_s"] = "acceptance"
    costs: tuple[Milliseconds, Milliseconds, Milliseconds] | None = None
    responses: Count = 1000
    heldout: Count = 100
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)] = (0.0, 0.7, 1.0)
    max_tokens: Annotated[int, Field(ge=2)] = 256
    generate_batch: Count = 16
    steps: Count = 300
    batch_size: Count = 64
    learning_rate: Rate = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    evaluate_every: Count = 10
    threads: Count = 1
