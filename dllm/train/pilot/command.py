"""``dllm train pilot``: measure every draft width on prompts, train a pilot that chooses one.

    dllm train pilot --target TARGET --drafter DRAFTER --out runs/pilot
    dllm train pilot ... --trials runs/pilot/trials.safetensors --label acceptance

Written to --out:
    trials.safetensors                what every width took on every prompt (for a later --trials)
    pilot.safetensors, pilot.json     the pilot, for ``"policy": "pilot", "pilot": OUT``
    report.csv                        the pilot and every fixed width, on prompts held out
"""

import argparse
import csv
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dllm.drafter.widths.pilot import PilotConfig
from dllm.settings.command import OK, CommandError
from dllm.train.drafter.export import block_of
from dllm.train.drafter.prompts import default_file, load_prompts
from dllm.train.drafter.settings import CalibrateSettings
from dllm.train.pilot.network import LABELS, Trials, scores, train_pilot
from dllm.train.progress import progress

if TYPE_CHECKING:
    from dllm.train.pilot.trials import TrialSettings

TRIALS, REPORT = "trials.safetensors", "report.csv"
WIDTHS = (0, 1, 2, 3, 5, 7, 11, 15)


def main(argv: Sequence[str]) -> int:
    """Run the trials, train, report.

    Raises:
        CommandError: something is missing or wrong.
    """
    given = parse(argv)
    if given.trials is not None and not given.trials.exists():
        raise CommandError(
            f"--trials {given.trials}: no such file; leave it out to run the trials."
        )
    given.out.mkdir(parents=True, exist_ok=True)
    trials = measure(given) if given.trials is None else Trials.load(given.trials)
    config = PilotConfig(trials.widths, trials.logits.shape[1])
    pilot = train_pilot(trials, config, given.label, given.seed)
    pilot.save(given.out)
    write(given.out / REPORT, [asdict(one) for one in scores(trials, pilot)])
    print(given.out)
    return OK


def measure(given: argparse.Namespace) -> Trials:
    """Answer the prompts at every candidate width, and save what they took."""
    settings = trial_settings(given)
    asked = CalibrateSettings(responses=given.questions, heldout=given.heldout, seed=given.seed)
    file = given.prompts or default_file(given.target)
    prompts = load_prompts(given.target, file, asked)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
    from dllm.train.pilot.trials import batches, run_trials

    tokens, is_heldout = [one.tokens for one in prompts], [one.is_heldout for one in prompts]
    num_batches = len(list(batches(len(prompts), settings.concurrency)))
    with progress(f"{len(settings.widths)} widths", num_batches) as shown:
        trials = run_trials(settings, tokens, is_heldout, shown.advance)
    trials.save(given.out / TRIALS)
    return trials


def trial_settings(given: argparse.Namespace) -> "TrialSettings":
    """The trials that the command line asks for.

    Raises:
        CommandError: there is no drafter, or no candidate width that it can draft.
    """
    from dllm.train.pilot.trials import TrialSettings

    config = given.drafter / "config.json"
    if not config.exists():
        raise CommandError(f"--drafter {given.drafter}: no config.json there.")
    num_drafts = block_of(json.loads(config.read_text())) - 1
    widths = given.widths or [width for width in WIDTHS if width <= num_drafts]
    if max(widths) > num_drafts or min(widths) < 0:
        raise CommandError(
            f"--widths {widths}; allowed: from 0 to the {num_drafts} tokens that the drafter "
            "drafts at a time."
        )
    return TrialSettings(
        given.target,
        given.drafter,
        tuple(sorted(set(widths))),
        num_drafts,
        given.concurrency,
        given.max_tokens,
        given.temperature,
        given.eager,
    )


def at_least_one(text: str) -> int:
    """A number of an option that counts something."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}; allowed: at least 1.")
    return number


def write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write rows as a CSV file, and print them."""
    cells = [
        {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()}
        for row in rows
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(cells[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)
    print("  ".join(cells[0]))
    for row in cells:
        print("  ".join(str(value) for value in row.values()))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="dllm train pilot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--drafter", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--out", type=Path, required=True, help="directory of the pilot")
    parser.add_argument("--prompts", type=Path, help="text or JSONL; default as for calibrate")
    for name, default, text in (
        ("questions", 24, "to train on: a family of the task suite; of --prompts: in all"),
        ("heldout", 12, "to report on, likewise"),
        ("concurrency", 1, "prompts at once"),
        ("max-tokens", 128, "of an answer"),
    ):
        help_text = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=at_least_one, default=default, help=help_text)
    parser.add_argument("--widths", type=int, nargs="+", help=f"candidates (of {WIDTHS})")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument("--trials", type=Path, help="of an earlier run, instead of new ones")
    parser.add_argument("--label", choices=LABELS, default=LABELS[0])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)
