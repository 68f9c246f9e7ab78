"""CalibrateSettings: everything that a run of ``dllm calibrate`` is made of, from a TOML file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dllm.settings.checks import FloatRange, check_int, refuse_value
from dllm.settings.command import CommandError
from dllm.train.settings import RunSettings

HiddenStates = Literal["stored", "recomputed"]


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter's network; None: the target's size.

    Attributes:
        num_layers: transformer layers of the drafter.
        block_size: positions of a draft block: the last token, and one less drafts.
        target_layer_ids: 0-based layers of the target whose outputs the drafter reads, ascending;
            empty: as many as the drafter has layers, spread evenly (``presets.spread_layers``).
        mask_token_id: token at the positions to draft; None: the tokenizer's mask token.
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
            refuse_value("drafter.target_layer_ids", list(layers), "ascending layers of the target")


@dataclass(frozen=True, kw_only=True)
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

    steps: int = 3000
    batch_size: int = 32
    decay_from: float = 0.4
    anchors: int = 16
    gamma: float | None = None
    responses: int = 1000
    heldout: int = 40
    max_tokens: int = 256
    temperature: float = 0.0
    generate_batch: int = 64
    max_length: int = 2048
    hidden_states: HiddenStates = "stored"
    drafter: DrafterShape = field(default_factory=DrafterShape)

    AT_LEAST = RunSettings.AT_LEAST | {
        "anchors": 1,
        "responses": 1,
        "heldout": 1,
        "max_tokens": 2,
        "generate_batch": 1,
        "max_length": 4,
    }
    RANGES = RunSettings.RANGES | {"temperature": FloatRange(0, 10)}

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero = FloatRange(0, 1e6, excludes_low=True)
        if self.gamma is not None and self.gamma not in above_zero:
            refuse_value("gamma", self.gamma, str(above_zero))


def block_of(config: Mapping[str, object]) -> int:
    """Positions of a draft block, by a drafter's config.json; without the key ``DrafterShape``'s.

    Raises:
        CommandError: there is no such block.
    """
    size = config.get("block_size", DrafterShape.block_size)
    if type(size) is not int or size < 2:
        raise CommandError(
            f"The drafter's config.json: block_size = {size!r}; allowed: an integer of at least 2."
        )
    return size
