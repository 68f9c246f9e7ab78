"""Trains a pilot on trials, and scores its choices on prompts that are held out.

The method is BlockPilot's (``dllm.drafter.widths.pilot``). Two things are added. Of equally good
widths each is as right as the others. And a new pilot chooses the best fixed width whatever it
reads, and its training stops where it decides best for some prompts that it is not trained on.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.drafter.widths.pilot import Pilot, PilotConfig
from dllm.train.pilot_settings import CHECKED_ONE_IN, PilotTraining
from dllm.train.pilot_trials import Trials
from dllm.train.precision import autocast

HEADSTART = 1.0  # score of the best fixed width before training; that of the others is 0


def step_ms(widths: Sequence[int], costs: Sequence[float] | None) -> Tensor:
    """``[W]``: milliseconds of a step of each width; without costs 1, so that steps are counted.

    Args:
        costs: as ``PilotTraining.costs``.
    """
    if costs is None:
        return torch.ones(len(widths))
    plain, draft_pass, each = costs
    return torch.tensor([plain + draft_pass + each * width for width in widths])


def right_widths(steps: Tensor) -> Tensor:
    """The label ``acceptance``: ``[P, W]``, which sums to 1, from steps ``[P, W]``.

    The text is the same with every width, so fewest steps are most tokens a step.
    """
    is_best = (steps == steps.min(-1, keepdim=True).values).float()
    return is_best / is_best.sum(-1, keepdim=True)


def loss_of(scores: Tensor, steps: Tensor, ms: Tensor, label: str) -> Tensor:
    """Of scores ``[P, W]``: cross-entropy, or the expected time, the best width's being 1."""
    if label == "acceptance":
        return -(right_widths(steps) * scores.log_softmax(-1)).sum(-1).mean()
    taken = steps * ms
    slowness = taken / taken.min(-1, keepdim=True).values
    return (scores.softmax(-1) * slowness).sum(-1).mean()


def train(trials: Trials, settings: PilotTraining, ms: Tensor, device: str) -> Pilot:
    """A pilot, in bf16, for trials of which none is held out.

    Args:
        ms: ``[W]``, of a step of each width (``step_ms``).
    """
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.threads)
    is_checked = torch.arange(len(trials.tokens)) % CHECKED_ONE_IN == CHECKED_ONE_IN - 1
    steps = trials.steps.to(device)
    ms, learned = ms.to(device), (~is_checked).nonzero()[:, 0]
    vocab_size = trials.logits.shape[1]
    config = PilotConfig(trials.widths, vocab_size, settings.hidden_size, settings.reads)
    pilot = Pilot(config).to(device)
    start_at_best(pilot, int((steps[learned] * ms).sum(0).argmin()))
    optimizer = _optimizer(pilot, trials.logits[learned][: settings.batch_size], settings)
    best, least = _served(pilot), torch.inf
    for step in range(settings.steps + 1):
        if step % settings.evaluate_every == 0 or step == settings.steps:
            candidate = _served(pilot)
            chosen = candidate.choose(trials.logits[is_checked].to(device))
            taken = float((steps * ms)[is_checked].gather(1, chosen[:, None]).sum())
            if taken < least:
                best, least = candidate, taken
        batch = learned[torch.randint(len(learned), (settings.batch_size,))]
        with autocast(torch.device(device)):
            scores = pilot(trials.logits[batch].to(device)).float()
        loss_of(scores, steps[batch], ms, settings.label).backward()
        optimizer.step()
        optimizer.zero_grad()
    return best


@torch.no_grad()
def start_at_best(pilot: Pilot, place: int) -> None:
    """Let a pilot choose this width whatever it reads."""
    pilot.scores.weight.zero_()
    pilot.scores.bias.zero_()
    pilot.scores.bias[place] = HEADSTART


def _served(pilot: Pilot) -> Pilot:
    return copy.deepcopy(pilot).bfloat16().requires_grad_(False)


@torch.no_grad()
def _optimizer(pilot: Pilot, logits: Tensor, settings: PilotTraining) -> torch.optim.Optimizer:
    """AdamW. Its steps move every weight alike, so wide inputs need a lower rate."""
    device, groups = pilot.hidden.weight.device, []
    read = logits.to(device).float()
    read = read if settings.reads == "raw" else read.softmax(-1)
    for layer in (pilot.hidden, pilot.scores):
        rate = settings.learning_rate / float(read.abs().sum(-1).mean())
        groups.append({"params": [layer.weight], "lr": rate})
        groups.append({"params": [layer.bias], "lr": settings.learning_rate})
        read = layer(read).relu()
    return torch.optim.AdamW(groups, weight_decay=settings.weight_decay)


@dataclass(frozen=True)
class Score:
    """What a choice of widths reaches on all prompts together.

    Attributes:
        value: tokens a millisecond of steps; without costs, tokens a step.
    """

    choice: str
    tokens_a_step: float
    value: float


def score(trials: Trials, ms: Tensor, choice: str, places: Tensor) -> Score:
    """Of one width for each prompt: ``places`` ``[P]`` in ``trials.widths``."""
    steps = trials.steps.gather(1, places[:, None])[:, 0]
    tokens = float(trials.tokens.sum())
    return Score(choice, tokens / float(steps.sum()), tokens / float((steps * ms[places]).sum()))


def scores(trials: Trials, ms: Tensor, pilot: Pilot) -> dict[str, Score]:
    """Of the pilot, the best fixed width for these prompts, every width, and the oracle.

    The oracle takes the best width of each prompt.
    """
    weight = next(pilot.parameters())
    chosen = pilot.choose(trials.logits.to(weight.device)).cpu()
    of_fixed = [
        score(trials, ms, f"fixed {width}", torch.full_like(chosen, place))
        for place, width in enumerate(trials.widths)
    ]
    best = max(of_fixed, key=lambda one: one.value)
    oracle = (trials.steps * ms).argmin(-1)
    found = {
        "pilot": score(trials, ms, "pilot", chosen),
        "best fixed": best,
        "oracle": score(trials, ms, "oracle", oracle),
    }
    return found | {one.choice: one for one in of_fixed}
