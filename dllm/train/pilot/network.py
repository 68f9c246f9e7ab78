"""What every draft width costs each prompt, and a pilot that learns from it which one to take.

Every candidate width is run for real. A width's speed on a prompt is

    tokens / (steps on this prompt * seconds of a step at this width)

with the steps counted and their time averaged over all prompts: a single answer of a small model
is too short to time. Source of the method: BlockPilot (the third seed document), whose label is
``acceptance``: the width with the most tokens per step, whatever a step costs.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dllm.drafter.widths.pilot import Pilot, PilotConfig
from dllm.train.run import Learner, Run
from dllm.train.settings import RunSettings

LABELS = ("tokens_per_s", "acceptance")
STEPS, LEARNING_RATE, WEIGHT_DECAY = 300, 1e-3, 0.1


@dataclass(frozen=True)
class Trials:
    """Every prompt at every width.

    Attributes:
        widths: ``[W]``, ascending.
        logits: ``[prompts, vocab]`` fp32, the target's behind each prompt.
        tokens, steps: ``[prompts, W]``, of the answers; the prompt's own pass is a step.
        seconds: ``[W]``, of a step.
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
        """``[prompts, W]``, tokens per second."""
        return self.tokens / (self.steps * self.seconds)

    @property
    def acceptance(self) -> Tensor:
        """``[prompts, W]``, tokens per step."""
        return self.tokens / self.steps

    def only(self, widths: Sequence[int]) -> "Trials":
        """Those of some of the widths."""
        kept = [self.widths.index(width) for width in widths]
        return Trials(
            tuple(widths),
            self.logits,
            self.tokens[:, kept],
            self.steps[:, kept],
            self.seconds[kept],
            self.is_heldout,
        )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        names = ("logits", "tokens", "steps", "seconds", "is_heldout")
        tensors = {name: getattr(self, name).contiguous() for name in names}
        save_file(tensors, path, metadata={"widths": json.dumps(self.widths)})

    @classmethod
    def load(cls, path: Path) -> "Trials":
        """Read one."""
        with safe_open(path, "pt") as file:
            widths = tuple(json.loads(file.metadata()["widths"]))
            return cls(widths, **{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


class PilotLearner(Learner):
    """A pilot on the prompts that are not held out, all of them in every step.

    Label ``tokens_per_s`` minimizes the expected time relative to each prompt's best width, so
    that a near miss costs little and the best fixed width is never out of reach; ``acceptance`` is
    the paper's cross-entropy with the width of most tokens per step, the narrowest of equals.
    """

    def __init__(self, pilot: Pilot, trials: Trials, label: str, seed: int) -> None:
        kept = ~trials.is_heldout
        self.model, self.label = pilot, label
        self.settings = RunSettings(
            seed=seed,
            steps=STEPS,
            batch_size=int(kept.sum()),
            # The learning rate stays as it is, and there is no average.
            warmup_steps=0,
            decay_from=1.0,
            ema=0.0,
            clip=1e6,
            threads=torch.get_num_threads(),
        )
        self.logits = trials.logits[kept]
        speeds = trials.speeds[kept]
        self.slowness = speeds.max(-1, keepdim=True).values / speeds
        self.labels = trials.acceptance[kept].argmax(-1)

    def loss(self, step: int) -> Tensor:
        """Over all prompts."""
        scores = self.model(self.logits)
        if self.label == "acceptance":
            return torch.nn.functional.cross_entropy(scores, self.labels)
        return (scores.softmax(-1) * self.slowness).sum(-1).mean()


def train_pilot(trials: Trials, config: PilotConfig, label: str, seed: int = 0) -> Pilot:
    """A pilot of one of ``LABELS``, for the prompts that are not held out."""
    torch.manual_seed(seed)
    pilot = Pilot(config)
    optimizer = torch.optim.AdamW(pilot.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    run = Run(PilotLearner(pilot, trials, label, seed), None, [optimizer])
    for _ in run.run():
        pass
    return pilot


@dataclass(frozen=True)
class Score:
    """Of all held-out prompts together."""

    choice: str
    tokens_per_s: float
    acceptance: float


@dataclass(frozen=True)
class Footprint:
    """What choosing costs, once a request: milliseconds for prompts that end together; weights."""

    prompts: int
    ms: float
    weights_kb: float


def footprints(pilot: Pilot, logits: Tensor, repeats: int = 50) -> list[Footprint]:
    """Of 1, 8 and 32 prompts; the median of ``repeats`` on this machine."""
    weights = sum(weight.numel() * weight.element_size() for weight in pilot.parameters())
    found = []
    for prompts in (1, 8, 32):
        rows = logits[torch.arange(prompts) % len(logits)]
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            pilot.choose(rows)
            times.append(1e3 * (time.perf_counter() - start))
        found.append(Footprint(prompts, statistics.median(times), weights / 1000))
    return found


def score(trials: Trials, choice: str, chosen: Tensor) -> Score:
    """Speed and acceptance length when each held-out prompt gets the width at this place.

    chosen: ``[held-out prompts]``, indices of ``trials.widths``.
    """
    tokens, steps = (
        getattr(trials, name)[trials.is_heldout].gather(1, chosen[:, None])[:, 0]
        for name in ("tokens", "steps")
    )
    seconds = (steps * trials.seconds[chosen]).sum()
    total = tokens.sum()
    return Score(choice, float(total / seconds), float(total / steps.sum()))


def scores(trials: Trials, pilot: Pilot) -> list[Score]:
    """The pilot, every fixed width, and the best width of each prompt, on held-out prompts."""
    count = int(trials.is_heldout.sum())
    with torch.inference_mode():
        chosen = pilot(trials.logits[trials.is_heldout]).argmax(-1)
    fixed = [
        score(trials, f"fixed {width}", torch.full((count,), place))
        for place, width in enumerate(trials.widths)
    ]
    best = trials.speeds[trials.is_heldout].argmax(-1)
    return [score(trials, "pilot", chosen), *fixed, score(trials, "best of each prompt", best)]
