"""What ``dllm train pilot`` does with its command line: trials, a pilot, a report."""

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from dllm.drafter.widths.pilot import FILE
from dllm.settings.command import FAILED, OK, CommandError
from dllm.train.export import Drafter
from dllm.train.pilot import Score, scores, step_ms, train
from dllm.train.pilot_costs import measured_costs
from dllm.train.pilot_settings import OF_TRIALS, PilotTraining
from dllm.train.pilot_trials import Trials, candidates, record, recorded, refuse_too_few
from dllm.train.precision import device_of
from dllm.train.progress import progress
from dllm.train.prompts import Prompt, load_prompts
from dllm.train.run_files import START, begin, weights_digest, write_json, write_log
from dllm.train.settings import DrafterTraining
from dllm.train.target import Target, read_config, target_facts

TRIALS, COSTS, REPORT = "trials", "costs.json", "report.csv"
NUM_TIMED = 8  # prompts that are answered to measure costs


def run(given: argparse.Namespace) -> int:
    """The exit status. Raises as the command."""
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
    with progress("trials", len(prompts)) as shown:
        for done in record(given.out / TRIALS, prompts, target, drafter, settings):
            shown.advance(done)
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
    """Whether the pilot is better than the best fixed width, and that in a sentence."""
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
    """The settings of ``--config``, or the defaults; flags override them.

    Raises:
        CommandError: a setting is out of range.
    """
    settings = PilotTraining() if given.config is None else PilotTraining.load(given.config)
    try:
        return PilotTraining.from_mapping(settings.to_mapping() | given.overrides)
    except ValueError as error:
        raise CommandError(str(error)) from None


def inputs_of(
    given: argparse.Namespace, settings: PilotTraining, prompts: Sequence[Prompt]
) -> dict[str, object]:
    """What decides the trials of the run, by name."""
    asked = repr([prompt.tokens for prompt in prompts]).encode()
    return {name: getattr(settings, name) for name in OF_TRIALS} | {
        "target": str(given.target.resolve()),
        "drafter weights": weights_digest(given.drafter),
        "prompts": hashlib.sha256(asked).hexdigest(),
    }
