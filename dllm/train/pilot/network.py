"""Trains a pilot on trials: what every draft width took on every prompt, on a real engine.

The speed of a width on a prompt is

    tokens / (steps on this prompt * seconds of a step at this width)

Steps are counted prompt by prompt, but their time is averaged over all prompts, because one answer
of a small model is too short to time. The method is BlockPilot's. Its own label is ``acceptance``:
the width with the most tokens per step, however long a step takes.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dllm.drafter.widths.pilot import Pilot, PilotConfig

LABELS = ("tokens_per_s", "acceptance")
STEPS, LEARNING_RATE, WEIGHT_DECAY = 300, 1e-3, 0.1


@dataclass(frozen=True)
class Trials:
    """What every prompt took at every width.

    Attributes:
        widths: W candidates, ascending.
        logits: ``[prompts, vocab]`` fp32, of the target at the end of each prompt.
        tokens, steps: ``[prompts, W]``, of the answers; the pass over the prompt is a step.
        seconds: ``[W]``, mean of a step.
        is_heldout: ``[prompts]`` bool, kept from training.
    """

    widths: tuple[int, ...]
    logits: Tensor
    tokens: Tensor
    steps: Tensor
    seconds: Tensor
    is_heldout: Tensor

    @property
    def speeds(self) -> Tensor:
        """Tokens per second, ``[prompts, W]``."""
        return self.tokens / (self.steps * self.seconds)

    @property
    def acceptance(self) -> Tensor:
        """Tokens per step, ``[prompts, W]``."""
        return self.tokens / self.steps

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        names = ("logits", "tokens", "steps", "seconds", "is_heldout")
        tensors = {name: getattr(self, name).contiguous() for name in names}
        save_file(tensors, path, metadata={"widths": json.dumps(self.widths)})

    @classmethod
    def load(cls, path: Path) -> "Trials":
        """Read a file that ``save`` wrote."""
        with safe_open(path, "pt") as file:
            widths = tuple(json.loads(file.metadata()["widths"]))
            return cls(widths, **{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def train_pilot(trials: Trials, config: PilotConfig, label: str, seed: int = 0) -> Pilot:
    """A pilot for the prompts that are not held out; every step sees all of them.

    Label ``tokens_per_s``: the loss is the expected time, relative to the best width of each
    prompt, so a width that is nearly as fast costs little. Label ``acceptance``: the paper's
    cross-entropy with the width of most tokens per step; of equal ones, the narrowest.
    """
    torch.manual_seed(seed)
    pilot = Pilot(config)
    optimizer = torch.optim.AdamW(pilot.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    kept = ~trials.is_heldout
    logits, speeds = trials.logits[kept], trials.speeds[kept]
    slowness = speeds.max(-1, keepdim=True).values / speeds
    narrowest_of_most = trials.acceptance[kept].argmax(-1)
    for _ in range(STEPS):
        scores = pilot(logits)
        if label == "acceptance":
            loss = torch.nn.functional.cross_entropy(scores, narrowest_of_most)
        else:
            loss = (scores.softmax(-1) * slowness).sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return pilot


@dataclass(frozen=True)
class Score:
    """What a choice of widths reaches on all held-out prompts together."""

    choice: str
    tokens_per_s: float
    acceptance: float


def score(trials: Trials, choice: str, chosen: Tensor) -> Score:
    """Speed and acceptance length with one width for each held-out prompt.

    Args:
        choice: name of the choice in the report.
        chosen: ``[held-out prompts]``, indices into ``trials.widths``.
    """
    tokens, steps = (
        getattr(trials, name)[trials.is_heldout].gather(1, chosen[:, None])[:, 0]
        for name in ("tokens", "steps")
    )
    seconds = (steps * trials.seconds[chosen]).sum()
    total = tokens.sum()
    return Score(choice, float(total / seconds), float(total / steps.sum()))


def scores(trials: Trials, pilot: Pilot) -> list[Score]:
    """Scores of the pilot, of every fixed width, and of the best width of each prompt."""
    count = int(trials.is_heldout.sum())
    with torch.inference_mode():
        chosen = pilot(trials.logits[trials.is_heldout]).argmax(-1)
    fixed = [
        score(trials, f"fixed {width}", torch.full((count,), place))
        for place, width in enumerate(trials.widths)
    ]
    best = trials.speeds[trials.is_heldout].argmax(-1)
    return [score(trials, "pilot", chosen), *fixed, score(trials, "best of each prompt", best)]
