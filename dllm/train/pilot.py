"""``dllm train pilot``: trains a pilot on trials, and scores it on prompts that are held out.

The method is BlockPilot's (``dllm.drafter.widths.pilot``). Two things are added. Of equally good
widths each is as right as the others. And a new pilot chooses the best fixed width whatever it
reads, and its training stops where it decides best for some prompts that it is not trained on.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dllm.drafter.widths.pilot import FILE, Pilot, PilotConfig
from dllm.settings.command import FAILED, OK
from dllm.train.export import START, Drafter, begin, weights_digest, write_json, write_log
from dllm.train.optimizer import autocast, device_of
from dllm.train.pilot_trials import (
    Trials,
    candidates,
    measured_costs,
    record,
    recorded,
    refuse_too_few,
)
from dllm.train.responses import Prompt, digest_of, load_prompts
from dllm.train.run import Progress
from dllm.train.settings import CHECKED_ONE_IN, OF_TRIALS, DrafterTraining, PilotTraining
from dllm.train.target import Target, read_config, target_facts

HEADSTART = 1.0  # score of the best fixed width before training; that of the others is 0


def step_ms(widths: Sequence[int], costs: Sequence[float] | None) -> Tensor:
    """``[W]``, by ``PilotTraining.costs``; without costs 1, so that steps are counted."""
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
    """A pilot in bf16, for trials of which none is held out. ``ms``: ``[W]`` (``step_ms``)."""
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
    """What a choice of widths reaches on all prompts together."""

    choice: str
    tokens_a_step: float
    value: float  # tokens a millisecond of steps; without costs, tokens a step


def score(trials: Trials, ms: Tensor, choice: str, places: Tensor) -> Score:
    """Of one width for each prompt: ``places`` ``[P]`` in ``trials.widths``."""
    steps = trials.steps.gather(1, places[:, None])[:, 0]
    tokens = float(trials.tokens.sum())
    return Score(choice, tokens / float(steps.sum()), tokens / float((steps * ms[places]).sum()))


def scores(trials: Trials, ms: Tensor, pilot: Pilot) -> dict[str, Score]:
    """``best fixed`` is best for these prompts; the oracle takes the best width of each."""
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


TRIALS, COSTS, REPORT = "trials", "costs.json", "report.csv"
NUM_TIMED = 8  # prompts that are answered to measure costs


def run(given: argparse.Namespace) -> int:
    device = device_of(given.device)
    settings = load_settings(given)
    drafter = Drafter.load(given.drafter, target_facts(read_config(given.target)))
    asked = DrafterTraining(responses=settings.responses, heldout=settings.heldout)
    prompts = load_prompts(given.target, given.prompts, asked)
    refuse_too_few(f"--prompts {given.prompts}", [prompt.is_heldout for prompt in prompts])
    inputs = inputs_of(given, settings, prompts)
    begin(given.out, inputs, given.resume)
    write_json(given.out / START, inputs | settings.to_mapping())
    torch.set_num_threads(settings.threads)
    if settings.label == "tokens_per_s" and settings.costs is None:
        settings = replace(settings, costs=costs_of(given, drafter, prompts, settings))
    target = Target(given.target, device)
    progress = Progress("trials", len(prompts))
    for done in record(given.out / TRIALS, prompts, target, drafter, settings):
        progress.advance(done)
    return finish(given.out, recorded(given.out / TRIALS), settings, device)


def finish(out: Path, trials: Trials, settings: PilotTraining, device: str) -> int:
    """Train on trials, write the pilot and its report, and judge it. Returns the exit status."""
    costs = settings.costs if settings.label == "tokens_per_s" else None
    ms = step_ms(trials.widths, costs)
    pilot = train(trials.of(~trials.is_heldout), settings, ms, device)
    pilot.save(out / FILE)
    found = scores(trials.of(trials.is_heldout), ms, pilot)
    write_log(out / REPORT, [{"name": name} | asdict(one) for name, one in found.items()])
    is_better, sentence = verdict(found, int(trials.is_heldout.sum()))
    print(sentence)
    return OK if is_better else FAILED


def verdict(found: dict[str, Score], num_prompts: int) -> tuple[bool, str]:
    pilot, fixed, oracle = (found[name] for name in ("pilot", "best fixed", "oracle"))
    is_better = pilot.value > fixed.value
    words = "beats" if is_better else "does not beat"
    return is_better, (
        f"The pilot {words} the best fixed width on {num_prompts} held-out prompts: "
        f"{pilot.value:.4g} beside {fixed.value:.4g} ({fixed.choice}), and "
        f"{oracle.value:.4g} with the best width of each prompt."
    )


def costs_of(
    given: argparse.Namespace, drafter: Drafter, prompts: Sequence[Prompt], settings: PilotTraining
) -> tuple[float, float, float]:
    """As ``PilotTraining.costs``: measured once for a run, whose directory keeps them."""
    noted = given.out / COSTS
    if not noted.exists():
        widest = candidates(drafter.block - 1, settings.radius)[-1]
        timed = [prompt.tokens for prompt in prompts[:NUM_TIMED]]
        costs = measured_costs(given.target, given.drafter, widest, timed, settings.max_tokens)
        write_json(noted, {"costs": costs})
    plain, draft_pass, each = json.loads(noted.read_text())["costs"]
    print(f"costs: {plain:.3g} ms a step, {draft_pass:.3g} a draft pass, {each:.3g} a draft")
    return plain, draft_pass, each


def load_settings(given: argparse.Namespace) -> PilotTraining:
    """Of ``--config``, or defaults; flags override. Raises CommandError: one is out of range."""
    settings = PilotTraining() if given.config is None else PilotTraining.load(given.config)
    return settings.changed(given.overrides)


def inputs_of(
    given: argparse.Namespace, settings: PilotTraining, prompts: Sequence[Prompt]
) -> dict[str, object]:
    return {name: getattr(settings, name) for name in OF_TRIALS} | {
        "target": str(given.target.resolve()),
        "drafter weights": weights_digest(given.drafter),
        "prompts": digest_of(prompts),
    }
