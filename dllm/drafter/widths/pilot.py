"""The policy ``pilot``: a small network chooses each request's width once, after its prompt.

The target's distribution over the first answer token tells how predictable the answer will be. A
multi-layer perceptron maps it to one of a few candidate widths, and the request keeps that width.
``dllm train pilot`` (``dllm/train/pilot/network.py``) makes such a network.

Source: "BlockPilot: Instance-Adaptive Policy Learning for Diffusion-based Speculative Decoding",
whose network has two layers of hidden size 2048 and reads the raw distribution.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.settings.checks import check_int, known_fields

WEIGHTS, CONFIG = "pilot.safetensors", "pilot.json"
TOP_K = 32

# What the network reads, computed from the target's logits ``[rows, vocab]`` fp32.
PREPROCESSING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "raw": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "normalized": lambda logits: nn.functional.layer_norm(logits, logits.shape[-1:]),
    # The largest log-probabilities only: how the probability is spread, not over which tokens. The
    # input's size does not depend on the vocabulary.
    "top_k": lambda logits: logits.log_softmax(-1).topk(TOP_K).values,
}


@dataclass(frozen=True)
class PilotConfig:
    """A pilot's input, shape and candidate widths.

    Attributes:
        widths: the widths to choose from, ascending.
        vocab_size: the target's.
        preprocessing: a key of PREPROCESSING.
        hidden_size: size between two linear layers.
        num_layers: number of linear layers.
    """

    widths: tuple[int, ...]
    vocab_size: int
    preprocessing: str = "raw"
    hidden_size: int = 256
    num_layers: int = 2

    def __post_init__(self) -> None:
        for width in self.widths:
            check_int("a pilot's widths", width, 0)
        if not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"a pilot's widths = {self.widths}; allowed: ascending ones.")
        for key in ("vocab_size", "hidden_size", "num_layers"):
            check_int(f"a pilot's {key}", getattr(self, key), 1)
        if self.preprocessing not in PREPROCESSING:
            raise ValueError(
                f"a pilot's preprocessing = {self.preprocessing!r}; allowed: "
                f"{', '.join(PREPROCESSING)}."
            )

    @classmethod
    def load(cls, folder: str | Path) -> "PilotConfig":
        """Read the configuration from a pilot's folder.

        Raises:
            ValueError: the folder holds no pilot, or a value is not allowed.
        """
        path = Path(folder) / CONFIG
        if not path.exists() or not (Path(folder) / WEIGHTS).exists():
            raise ValueError(
                f"{folder} holds no {CONFIG} and {WEIGHTS}; make them with `dllm train pilot`."
            )
        try:
            given = json.loads(path.read_text())
            values = dict(known_fields(cls, given, str(path)))
            return cls(**values | {"widths": tuple(values["widths"])})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} is damaged ({error!r}); make it with `dllm train pilot`."
            ) from None

    def check_against(self, num_drafts: int, vocab_size: int) -> None:
        """Refuse a pilot that was made for another target or a wider draft block.

        Raises:
            ValueError: names the server's value and the pilot's.
        """
        if self.widths[-1] > num_drafts:
            raise ValueError(
                f"The pilot chooses widths up to {self.widths[-1]}, but num_speculative_tokens is "
                f"{num_drafts}."
            )
        if self.vocab_size != vocab_size:
            raise ValueError(
                f"The pilot reads distributions over {self.vocab_size} tokens, but the target has "
                f"{vocab_size}."
            )


class Pilot(nn.Module):
    """The multi-layer perceptron: the target's logits in, a score for each candidate width out."""

    def __init__(self, config: PilotConfig) -> None:
        super().__init__()
        self.config = config
        read = TOP_K if config.preprocessing == "top_k" else config.vocab_size
        sizes = [read] + [config.hidden_size] * (config.num_layers - 1) + [len(config.widths)]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores ``[rows, candidates]`` from the target's logits ``[rows, vocab]``."""
        scores: torch.Tensor = self.layers(PREPROCESSING[self.config.preprocessing](logits.float()))
        return scores

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor) -> np.ndarray:
        """``[rows]``: the width with the highest score, from logits ``[rows, vocab]``."""
        return np.array(self.config.widths)[self(logits).argmax(-1).cpu().numpy()]

    @classmethod
    def load(cls, folder: str | Path) -> "Pilot":
        """Read a pilot from its folder.

        Raises:
            ValueError: as ``PilotConfig.load``.
        """
        pilot = cls(PilotConfig.load(folder))
        pilot.load_state_dict(load_file(Path(folder) / WEIGHTS))
        return pilot

    def save(self, folder: Path) -> None:
        """Write weights and configuration into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(asdict(self.config), indent=1) + "\n")


class PilotWidth(WidthPolicy):
    """Every request keeps the width that the pilot chose when its prompt ended."""

    reads_outcomes = True
    reads_prompt = True

    def __init__(self, num_drafts: int, num_slots: int, pilot: Pilot) -> None:
        super().__init__(num_drafts)
        self.pilot = pilot
        self._chosen = np.zeros(num_slots, dtype=np.int64)

    def observe(self, step: VerifiedStep) -> None:
        """Choose the widths of requests whose prompts ended in this step."""
        # vLLM discards drafts of a prompt that is not finished: width 0 until its last chunk.
        self._chosen[step.slots[step.in_prompt]] = 0
        ends = step.in_prompt & step.samples
        if ends.any():
            assert step.prompt_logits is not None, "reads_prompt"
            self.pilot.to(step.prompt_logits.device)
            self._chosen[step.slots[ends]] = self.pilot.choose(step.prompt_logits)

    def wants_drafts(self, slots: np.ndarray) -> bool:
        """Whether any row's width is above 0."""
        return bool(self._chosen[slots].any())

    def widths(self, slots: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        """The chosen width of each row."""
        return self._chosen[slots]
