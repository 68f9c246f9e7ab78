"""CalibrateSettings: everything that a run of ``dllm calibrate`` is made of, from a TOML file."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.settings.checks import refuse_value
from dllm.train.settings import CHECKED, Count, RunSettings, Share

Id = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=CHECKED)
class DrafterShape:
    """Sizes of a drafter's network; None: the target's size.

    Attributes:
        num_layers: transformer layers of the drafter.
        block_size: positions of a draft block: the last token, and one less drafts.
        target_layer_ids: 0-based layers of the target whose outputs the drafter reads, ascending;
            empty: as many as the drafter has layers, spread evenly (``presets.spread_layers``).
        draft_vocab_size: tokens that it can draft, the most frequent ones of the responses; None:
            every token, by the target's own head. The head costs most of a small drafter's pass.
        mask_token_id: token at the positions to draft; None: the tokenizer's mask token.
    """

    num_layers: Count = 5
    block_size: Annotated[int, Field(ge=2)] = 16
    target_layer_ids: tuple[Id, ...] = ()
    mask_token_id: Id | None = None
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count | None = None
    draft_vocab_size: Count | None = None

    def __post_init__(self) -> None:
        layers = list(self.target_layer_ids)
        if layers != sorted(set(layers)):
            refuse_value("drafter.target_layer_ids", layers, "ascending layers of the target")


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class CalibrateSettings(RunSettings):
    """One calibration; the other fields are those of ``RunSettings``.

    Attributes:
        seed: of the initial weights, the responses and the anchors.
        batch_size: sequences (a prompt and its response) in each step.
        anchors: draft blocks in each sequence, each behind a random token of the response.
        gamma: draft k weighs exp(-(k - 1) / gamma) in the loss, tokens; None: block_size / 2.
        responses: task suite: training prompts of each family; prompt file: at most so many.
        heldout: task suite: held-out prompts of each family; prompt file: the first so many.
        max_tokens: of a response.
        temperature: of the responses to train on; held-out ones are greedy.
        generate_batch: responses generated at once.
        max_length: sequences are cut to so many tokens.
        hidden_states: ``stored`` on disk once, or ``recomputed`` by the target at every step.
        drafter: table ``[drafter]``: the network; with ``--drafter`` it is that checkpoint's.
    """

    steps: Count = 3000
    batch_size: Count = 32
    decay_from: Share = 0.4
    anchors: Count = 16
    gamma: Annotated[float, Field(gt=0)] | None = None
    responses: Count = 1000
    heldout: Count = 40
    max_tokens: Annotated[int, Field(ge=2)] = 256
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    generate_batch: Count = 64
    max_length: Annotated[int, Field(ge=4)] = 2048
    hidden_states: Literal["stored", "recomputed"] = "stored"
    drafter: DrafterShape = field(default_factory=DrafterShape)
