"""DrafterTraining, PilotTraining: all that a run of ``dllm train`` is made of, from TOML files."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.settings.checks import did_you_mean, refuse_value
from dllm.settings.command import CommandError
from dllm.settings.options import CHECKED, Count, Natural, Share, read_options

CONFIGS = Path(__file__).parent / "configs"
Rate = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, config=CHECKED)
class DrafterShape:
    """Sizes of a drafter's network; None: the target's size.

    Attributes:
        num_layers: transformer layers of the drafter.
        block_size: positions of a draft block: the last token, and one less drafts.
        target_layer_ids: 0-based layers of the target whose outputs the drafter reads, ascending;
            empty: as many as the drafter has layers, spread evenly (``config.spread_layers``).
        draft_vocab_size: tokens that it can draft, the most frequent ones of the responses; None:
            every token, by the target's own head. The head costs most of a small drafter's pass.
        mask_token_id: token at the positions to draft, as an id or as the target's tokenizer writes
            it; None: the tokenizer's mask token.
    """

    num_layers: Count = 5
    block_size: Annotated[int, Field(ge=2)] = 16
    target_layer_ids: tuple[Natural, ...] = ()
    mask_token_id: Natural | str | None = None
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count | None = None
    draft_vocab_size: Count | None = None

    def __post_init__(self) -> None:
        layers = list(self.target_layer_ids)
        if layers != sorted(set(layers)):
            refuse_value("drafter.target_layer_ids", layers, "ascending layers of the target")


@dataclass(frozen=True, config=CHECKED)
class AdapterShape:
    """A LoRA adapter with which the target drafts for itself, in place of a drafter.

    Attributes:
        rank: of the change of a layer.
        target_modules: names of the layers that it changes.
        num_drafts: tokens that a pass drafts.
        uno_mask_token_id: of an autoregressive target: noise is ids from 1 to below this; None:
            all.
    """

    rank: Count = 16
    target_modules: tuple[str, ...] = ("o_proj",)
    num_drafts: Count = 31
    uno_mask_token_id: Annotated[int, Field(ge=2)] | None = None


class TomlSettings:
    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises CommandError: no such file, no TOML, or a field is unknown or out of range."""
        try:
            return cls.from_mapping(tomllib.loads(path.read_text()))
        except (OSError, ValueError) as error:  # TOMLDecodeError is a ValueError
            raise CommandError(f"{path}: {error}") from None

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """Raises ValueError that names the first field that is unknown or out of range."""
        return read_options(cls, values)

    def changed(self, changes: Mapping[str, object]) -> Self:
        """Raises CommandError: a value is out of range."""
        try:
            return self.from_mapping(self.to_mapping() | dict(changes))
        except ValueError as error:
            raise CommandError(str(error)) from None

    def to_mapping(self) -> dict[str, object]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DrafterTraining(TomlSettings):
    """One calibration; together with the run's inputs it decides the weights.

    Attributes:
        seed: of the initial weights, the responses and the anchors.
        steps: optimizer steps in all.
        batch_size: sequences (a prompt and its response) in each step.
        anchors: draft blocks in each sequence, each behind a random token of the response.
        gamma: draft k weighs exp(-(k - 1) / gamma) in the loss, tokens; None: block_size / 2.
        revealed_share: of the draft blocks, which show the target's token at some positions, as the
            later passes of ``denoise_steps`` see drafts there; the others are all masks.
        matrix_lr, vector_lr: peak learning rate of Muon and of AdamW.
        warmup_steps: the learning rates grow linearly over so many steps.
        decay_from: fraction of the run after which the learning rates fall, along a cosine.
        final_lr: fraction of the peak that is left at the end.
        ema: decay of the average of the weights, which is what is evaluated and written.
        clip: largest norm of the gradient.
        responses: prompts to train on, at most.
        heldout: the first so many prompts, which are measured on and not trained on.
        max_tokens: of a response.
        temperature: of the responses to train on; held-out ones are greedy.
        generate_batch: responses generated at once.
        max_length: sequences are cut to so many tokens.
        hidden_states: ``stored`` on disk once, or ``recomputed`` by the target at every step.
        evaluate_every, checkpoint_every: steps.
        threads: of the CPU; the last bits of the weights depend on it.
        drafter: table ``[drafter]``: the network; with ``--drafter`` it is that checkpoint's.
        adapter: table ``[adapter]``: an adapter of the target in place of a drafter.
    """

    seed: Natural = 0
    steps: Count = 3000
    batch_size: Count = 32
    anchors: Count = 16
    gamma: Annotated[float, Field(gt=0)] | None = None
    revealed_share: Share = 0.0
    matrix_lr: Rate = 0.02
    vector_lr: Rate = 0.003
    warmup_steps: Natural = 100
    decay_from: Share = 0.4
    final_lr: Share = 0.02
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.998
    clip: Annotated[float, Field(gt=0)] = 1.0
    responses: Count = 1000
    heldout: Count = 40
    max_tokens: Annotated[int, Field(ge=2)] = 256
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    generate_batch: Count = 64
    max_length: Annotated[int, Field(ge=4)] = 2048
    hidden_states: Literal["stored", "recomputed"] = "stored"
    evaluate_every: Count = 500
    checkpoint_every: Count = 250
    threads: Count = 1
    drafter: DrafterShape = field(default_factory=DrafterShape)
    adapter: AdapterShape | None = None

    @classmethod
    def load(cls, path: Path) -> Self:
        """A file, or the bundled one of this name. Raises as ``TomlSettings.load``."""
        names = bundled_configs()
        if str(path) in names:
            path = CONFIGS / f"{path}.toml"
        elif not path.exists():
            hint = did_you_mean(str(path), names)
            raise CommandError(f"{path}: no such file{hint}; allowed, too: {', '.join(names)}.")
        return super().load(path)


def bundled_configs() -> list[str]:
    return sorted(path.name.removesuffix(".toml") for path in CONFIGS.glob("*.toml"))


# For a new drafter of any target.
NEW = DrafterTraining(
    steps=20000,
    batch_size=4,
    anchors=256,
    matrix_lr=0.005,
    vector_lr=0.0006,
    responses=50000,
    heldout=100,
    max_tokens=1024,
)
# For a run that starts from a trained drafter: low learning rates, so that it forgets little.
CONTINUED = DrafterTraining(
    steps=1000, matrix_lr=0.003, vector_lr=0.0003, decay_from=0.0, anchors=16
)

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

    seed: Natural = 0
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
