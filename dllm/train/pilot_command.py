"""``dllm train pilot``: which draft width pays for a request, learned from its prompt.

    dllm train pilot --target TARGET --drafter DRAFTER --prompts FILE --out runs/pilot

Written to --out:
    trials/              what every width kept on every prompt; --resume and bench.pilot read them
    costs.json           measured milliseconds, for the label tokens_per_s without `costs`
    pilot.safetensors    the pilot, for {"policy": "pilot", "pilot": "runs/pilot/pilot.safetensors"}
    report.csv           the pilot, fixed widths and the oracle, on prompts that are held out

Exit status 1: the best fixed width is as good on those.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dllm.prompts.files import BUNDLED

# Flags that override a setting of the config: (field, type, help text).
OVERRIDES = {
    "--num-prompts": ("responses", int, "prompts to train on, at most"),
    "--heldout": ("heldout", int, "further prompts to measure on: the first of the file"),
    "--max-tokens": ("max_tokens", int, "tokens of a response, at most"),
    "--radius": ("radius", int, "candidates: so many widths below and above the drafter's own"),
    "--hidden-size": ("hidden_size", int, "of the pilot"),
    "--label": ("label", str, "acceptance or tokens_per_s"),
}

RESUME = "go on with the run in --out; settings of the training may differ from before"


def main(argv: Sequence[str]) -> int:
    """Record, train, report.

    Raises:
        CommandError: something is missing or wrong.
    """
    given = parse(argv)
    from dllm.train.pilot_run import run

    return run(given)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dllm train pilot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--drafter", type=Path, required=True, help="likewise, z-lab's format")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--config", type=Path, help="settings of the run: a TOML file")
    parser.add_argument(
        "--prompts", type=Path, default=BUNDLED, help="text or JSONL; default: bundled prompts"
    )
    for flag, (field, kind, text) in OVERRIDES.items():
        parser.add_argument(flag, type=kind, dest=field, metavar=field.upper(), help=text)
    parser.add_argument("--device", help="without it cuda, if there is a GPU, else cpu")
    parser.add_argument("--resume", action="store_true", help=RESUME)
    given = parser.parse_args(argv)
    asked = {field: getattr(given, field) for field, *_ in OVERRIDES.values()}
    given.overrides = {field: value for field, value in asked.items() if value is not None}
    return given
