"""What a pilot gains: the ablation of BlockPilot's paper, on prompts that are held out.

    dllm train pilot --target TARGET --drafter DRAFTER --prompts FILE --radius 3 --out RUN
    python -m bench.pilot --run RUN --costs 40 3 0.5

The first command answers the prompts and tries the widths; its own pilot is one cell of the table.
The second one trains a pilot for each radius, hidden size and input. Widths are judged by tokens a
millisecond, with given costs (--costs: of a step, of a draft pass, of each verified draft): what a
pilot gains is less than the noise of a served figure.

    best fixed   the width that is best for these very prompts
    adaptive     the policy, which learns from prompt to prompt; its own blocks have trained width
    oracle       the best width of each prompt

Written to --results: --file, one row a pilot. Cells that --minutes leave no time for have none.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch

from bench.context import Row, Rows, command_line, progress, publish, read_csv, reporting_failures
from bench.tables import Section, grouped, markdown
from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.policy import VerifiedStep
from dllm.train.pilot import TRIALS, Score, scores, step_ms, train
from dllm.train.pilot_trials import Trials, recorded
from dllm.train.settings import PilotTraining

FILE = "pilot.csv"
RADII, HIDDEN, READS = (1, 2, 3), (256, 2048), ("raw", "softmax")
LABELS = ("tokens_per_s", "acceptance")


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    trials = recorded(options.run / TRIALS)
    heldout = trials.of(trials.is_heldout)
    adaptive = adaptive_value(heldout, options.costs)
    end = time.monotonic() + 60 * options.minutes
    rows: list[Row] = []
    path = options.results / options.file
    for label, radius, hidden, reads in product(options.labels, options.radii, HIDDEN, READS):
        chosen = {"label": label, "radius": radius, "hidden_size": hidden, "reads": reads}
        of_all = {"steps": options.steps, "threads": options.threads}
        settings = PilotTraining.from_mapping(chosen | of_all)
        progress(f"{label}, radius {radius}, hidden {hidden}, {reads}")
        found = {} if time.monotonic() > end else cell(trials.within(radius), settings, options)
        rows.append(row_of(settings, found, adaptive, len(heldout.tokens)))
        publish(path, rows)
    print(f"{table(read_csv(path))}\n\n{path}")
    return 0


def cell(trials: Trials, settings: PilotTraining, options: argparse.Namespace) -> dict[str, Score]:
    ms = step_ms(trials.widths, options.costs)
    pilot = train(trials.of(~trials.is_heldout), settings, ms, options.device)
    return scores(trials.of(trials.is_heldout), ms, pilot)


def row_of(
    settings: PilotTraining, found: dict[str, Score], adaptive: float, num_prompts: int
) -> Row:
    row: Row = {
        "label": settings.label,
        "radius": settings.radius,
        "hidden": settings.hidden_size,
        "reads": settings.reads,
        "prompts": num_prompts,
        "adaptive": adaptive,
    }
    for name in ("best fixed", "pilot", "oracle"):
        one = found.get(name)
        row[name] = None if one is None else one.value
        row[f"{name}, tokens a step"] = None if one is None else one.tokens_a_step
    row["width"] = found["best fixed"].choice if found else None
    return row


def adaptive_value(trials: Trials, costs: Sequence[float]) -> float:
    """Tokens a millisecond of the policy ``adaptive``, which answers the prompts one by one.

    Its clock shows the costs alone, from which it learns them.
    """
    plain, draft_pass, each = costs
    now = 0.0
    policy = AdaptiveWidth(trials.trained, 1, clock=lambda: now)
    slots, yes, none = np.zeros(1, dtype=np.int64), np.ones(1, dtype=bool), np.zeros(1, dtype=int)
    kept = trials.kept[:, trials.widths.index(trials.trained)].numpy()
    confidence = trials.confidence.float().numpy()
    for start, stop in pairwise(trials.starts.tolist()):
        policy.observe(VerifiedStep(slots, yes, none, none, False))  # the prompt
        at = start
        while at < stop:
            drafts, width = policy.wants_drafts(slots), 0
            if drafts:
                now += draft_pass / 1e3
                width = int(policy.widths(slots, confidence[at : at + 1])[0])
            accepted = min(width, int(kept[at]))
            now += (plain + each * width) / 1e3
            counts = np.array([width]), np.array([accepted])
            policy.observe(VerifiedStep(slots, ~yes, *counts, drafts))
            at += accepted + 1
    return float(trials.tokens.sum()) / (1e3 * now)


# --- command line and table ----------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="--out of `dllm train pilot`")
    parser.add_argument("--costs", type=float, nargs=3, required=True, metavar="MS")
    parser.add_argument("--file", default=FILE, help=f"in --results ({FILE})")
    parser.add_argument("--radii", type=int, nargs="+", default=RADII)
    parser.add_argument("--labels", nargs="+", choices=LABELS, default=LABELS[:1])
    parser.add_argument("--minutes", type=float, default=60, help="no cell begins later")
    parser.add_argument("--steps", type=int, default=PilotTraining.steps, help="of a training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def table(rows: Rows) -> str:
    """A line for each radius and hidden size, a column for each label and input."""
    pilots = grouped(rows, "label", "reads")
    header = ["radius", "hidden", "best fixed", "adaptive, %", "oracle, %"]
    header += [f"{label}, {reads}, %" for label, reads in pilots]
    lines = []
    for sizes, here in grouped(rows, "radius", "hidden").items():
        known = next((row for row in here if row["pilot"]), None)
        beside = [NOT_TRAINED] * 3
        if known is not None:
            gains = (f"{gain(known, name):+.2f}" for name in ("adaptive", "oracle"))
            beside = [known["width"], *gains]
        lines.append([*sizes, *beside, *map(cell_of, here)])
    about = (
        "Gains in tokens a millisecond over the best fixed width; in parentheses the pilot's share "
        f"of the oracle's. {rows[0]['prompts']} prompts."
    )
    return f"{markdown(header, lines)}\n\n{about}"


def cell_of(row: dict[str, str]) -> str:
    if not row["pilot"]:
        return NOT_TRAINED
    own, most = gain(row, "pilot"), gain(row, "oracle")
    return f"{own:+.2f} ({own / most:.2f})" if most else f"{own:+.2f}"


def gain(row: dict[str, str], name: str) -> float:
    """Over the best fixed width, in percent."""
    return 100 * (float(row[name]) / float(row["best fixed"]) - 1)


NOT_TRAINED = "not trained"
SECTION = Section(FILE, "python -m bench.pilot --run RUN --costs MS MS MS", table)

if __name__ == "__main__":
    sys.exit(main())
