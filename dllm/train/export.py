"""Drafter checkpoints in z-lab's format: reading, checking against a target, writing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from dllm.drafter.checkpoint import DrafterConfig, TargetFacts, check_pair
from dllm.settings.command import CommandError
from dllm.settings.drafting import DrafterOptions
from dllm.train.network import DraftNetwork
from dllm.train.run_files import WEIGHTS, write_json, write_weights
from dllm.train.settings import DrafterShape


@dataclass(frozen=True)
class Drafter:
    """A drafter of one target.

    Attributes:
        config: its config.json, which ``read`` is the parsed form of.
        block: positions of a draft block, the last token included.
        weights: fp32, by name; None: a new drafter, whose weights are to be drawn.
    """

    config: dict[str, object]
    read: DrafterConfig
    block: int
    weights: dict[str, Tensor] | None

    @classmethod
    def of(
        cls, config: dict[str, object], facts: TargetFacts, weights: dict[str, Tensor] | None = None
    ) -> "Drafter":
        """A drafter for a target, from its config.json.

        Raises:
            CommandError: something of it is missing or wrong, or it does not fit the target.
        """
        return cls(config, checked_config(config, facts), block_of(config), weights)

    @classmethod
    def load(cls, path: Path, facts: TargetFacts) -> "Drafter":
        """Raises as ``of``, ``read_checkpoint`` and ``network``."""
        config, weights = read_checkpoint(path)
        found = cls.of(config, facts, weights)
        found.network()
        return found

    def network(self) -> DraftNetwork:
        """Raises CommandError if config.json does not fit the weights."""
        network = DraftNetwork(self.read)
        if self.weights is not None:
            try:
                network.load_state_dict(self.weights)
            except RuntimeError as error:
                raise CommandError(
                    f"the drafter's tensors contradict its config.json: {error}"
                ) from None
        return network


def checked_config(config: dict[str, object], facts: TargetFacts) -> DrafterConfig:
    """The config.json of a drafter for this target, parsed.

    Raises:
        CommandError: something of it is missing or wrong, or it does not fit the target.
    """
    try:
        read = DrafterConfig.from_config(config, DrafterOptions())
        check_pair(read, facts)
    except ValueError as error:
        raise CommandError(str(error)) from None
    return read


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


def write_checkpoint(path: Path, config: Mapping[str, object], weights: dict[str, Tensor]) -> None:
    """Write config.json and bf16 safetensors, which vLLM's own drafter and ours load."""
    path.mkdir(parents=True, exist_ok=True)
    write_weights(path / WEIGHTS, weights, kept=("d2t",))
    write_json(path / "config.json", config)


def read_checkpoint(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """config.json and fp32 weights of a drafter in z-lab's format.

    Raises:
        CommandError: there is none, or our training network cannot represent it.
    """
    try:
        config = json.loads((path / "config.json").read_text())
        weights = load_file(path / WEIGHTS)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path}: no drafter with config.json and {WEIGHTS} ({error})."
        ) from None
    is_own = "embed_tokens.weight" in weights
    if "speculators_model_type" in config or is_own or "quantization_config" in config:
        raise CommandError(
            f"{path} is in the speculators format, quantized, or has "
            f"{'an embedding of its own' if is_own else 'such a config.json'}; allowed: z-lab's "
            "format with the target's embedding, in bf16 or wider."
        )
    return config, {name.removeprefix("model."): t.float() for name, t in weights.items()}
