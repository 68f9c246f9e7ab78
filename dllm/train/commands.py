"""The command lines of ``dllm train``, ``recalibrate`` and ``check-drafter``.

Each is read first, and what it does is imported then: ``--help`` needs no torch.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from dllm.prompts.files import BUNDLED
from dllm.settings.command import positive
from dllm.tools import client
from dllm.train.settings import bundled_configs

Overrides = Mapping[str, tuple[str, type, str]]

# Flags that override a setting of a config: (field, type, help text).
OF_ALL = {
    "--num-prompts": ("responses", int, "prompts to train on, at most"),
    "--heldout": ("heldout", int, "further prompts to measure on: the first of the file"),
    "--max-tokens": ("max_tokens", int, "tokens of a response, at most"),
}
OF_DRAFTER = OF_ALL | {
    "--steps": ("steps", int, "training steps"),
    "--batch-size": ("batch_size", int, "responses in each step"),
}
OF_PILOT = OF_ALL | {
    "--radius": ("radius", int, "candidates: so many widths below and above the drafter's own"),
    "--hidden-size": ("hidden_size", int, "of the pilot"),
    "--label": ("label", str, "acceptance or tokens_per_s"),
}
RESPONSES = {field for field, *_ in OF_ALL.values()}  # which a buffer has already
RESUME_PILOT = "go on with the run in --out; settings of the training may differ from before"
NUM_PROMPTS, MAX_TOKENS = 10, 96  # of `check-drafter`
PILOT = """Which draft width pays for a request, learned from its prompt.

Written to --out:
    trials/              what every width kept on every prompt; --resume reads them
    costs.json           measured milliseconds, for the label tokens_per_s without `costs`
    pilot.safetensors    the pilot, for {"policy": "pilot", "pilot": "runs/pilot/pilot.safetensors"}
    report.csv           the pilot, fixed widths and the oracle, on prompts that are held out

Exit status 1: the best fixed width is as good on those.
"""
RECALIBRATE = """Go on training a server's drafter on its traffic, beside the server.

Each round trains for a few hundred steps on what the server has recorded (`record`). If more
drafts of the held-out part of the recording are then accepted, the drafter is published in a
folder, which the server watches (`renew`). It runs at the lowest priority and stops with Ctrl-C.
"""


def train_drafter(argv: Sequence[str]) -> int:
    """Writes ``OUT/model``. Raises CommandError before any work: something is missing or wrong."""
    given = parse_drafter(argv)
    from dllm.train.drafter import train

    return train(given, argv)


def train_pilot(argv: Sequence[str]) -> int:
    """Record, train, report. Raises CommandError: something is missing or wrong."""
    given = parse_pilot(argv)
    from dllm.train.pilot import run

    return run(given)


def recalibrate(argv: Sequence[str]) -> int:
    given = parse_recalibrate(argv)
    from dllm.train.recalibrate import recalibrate

    return recalibrate(given)


def check_drafter(argv: Sequence[str]) -> int:
    """0: the pair fits; 1: it does not. CommandError: no server takes it, or nothing to measure."""
    given = parse_check(argv)
    from dllm.train.drafter import check

    return check(given)


def parse_drafter(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dllm train drafter",
        description="From a target and prompts to a drafter that vLLM serves beside it.",
    )
    parser.add_argument("--target", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument(
        "--config",
        type=Path,
        help=f"settings of the run: a TOML file, or a name: {', '.join(bundled_configs())}",
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "--prompts",
        type=Path,
        default=BUNDLED,
        help="text, one a line, or JSONL; default: bundled general prompts",
    )
    data.add_argument("--from-buffer", type=Path, help="recorded traffic (docs/calibration.md)")
    parser.add_argument(
        "--from-server", metavar="URL", help="an OpenAI-compatible server writes the responses"
    )
    parser.add_argument("--model", help="its served model name (the only one, if there is one)")
    client.add_key(parser)
    parser.add_argument("--drafter", type=Path, help="go on from this drafter's weights")
    parser.add_argument(
        "--mask-token-id",
        type=id_or_token,
        metavar="ID",
        help="token that stands at positions to draft, or its id; one that no text holds "
        "(default: the tokenizer's mask token)",
    )
    add_overrides(parser, OF_DRAFTER)
    parser.add_argument(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help="peak rate of Muon (matrix_lr); vector_lr keeps its ratio to it",
    )
    parser.add_argument("--device", help="without it cuda, if there is a GPU, else cpu")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    given = parser.parse_args(argv)
    if given.from_buffer and given.from_server:
        parser.error("--from-buffer has its responses; leave out --from-server.")
    if given.drafter and given.mask_token_id is not None:
        parser.error("--drafter brings its own mask token; leave out --mask-token-id.")
    if given.model and not given.from_server:
        parser.error("--model names a model of --from-server.")
    given.overrides = overrides(given, OF_DRAFTER)
    if given.from_buffer and not RESPONSES.isdisjoint(given.overrides):
        parser.error("--from-buffer: its responses are there; leave out the flags about them.")
    return given


def parse_pilot(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dllm train pilot",
        description=PILOT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--drafter", type=Path, required=True, help="likewise, z-lab's format")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--config", type=Path, help="settings of the run: a TOML file")
    parser.add_argument(
        "--prompts", type=Path, default=BUNDLED, help="text or JSONL; default: bundled prompts"
    )
    add_overrides(parser, OF_PILOT)
    parser.add_argument("--device", help="without it cuda, if there is a GPU, else cpu")
    parser.add_argument("--resume", action="store_true", help=RESUME_PILOT)
    given = parser.parse_args(argv)
    given.overrides = overrides(given, OF_PILOT)
    return given


def parse_recalibrate(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dllm recalibrate", description=RECALIBRATE)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--drafter", type=Path, required=True, help="that the server started with")
    parser.add_argument("--buffer", type=Path, required=True, help="the server's `record` folder")
    parser.add_argument("--out", type=Path, required=True, help="the server's `renew` folder")
    parser.add_argument("--steps", type=positive, default=200, help="training steps of a round")
    parser.add_argument("--rounds", type=positive, help="stop after so many; default: go on")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(argv)


def parse_check(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dllm check-drafter",
        description="Measure what a target accepts of a drafter.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("target", type=Path, help="checkpoint directory")
    parser.add_argument("drafter", type=Path, help="checkpoint directory, z-lab's format")
    parser.add_argument(
        "--prompts", type=Path, default=BUNDLED, help="text or JSONL, at least --num-prompts"
    )
    parser.add_argument("--num-prompts", type=int, default=NUM_PROMPTS, help="prompts to answer")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of a response")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found; -: print")
    parser.add_argument("--device", help="without it cuda, if there is a GPU, else cpu")
    given = parser.parse_args(argv)
    if given.num_prompts < 1 or given.max_tokens < 2:
        parser.error("--num-prompts is at least 1, --max-tokens at least 2.")
    return given


def add_overrides(parser: argparse.ArgumentParser, flags: Overrides) -> None:
    for flag, (field, kind, text) in flags.items():
        parser.add_argument(flag, type=kind, dest=field, metavar=field.upper(), help=text)


def overrides(given: argparse.Namespace, flags: Overrides) -> dict[str, object]:
    asked = {field: getattr(given, field) for field, *_ in flags.values()}
    return {field: value for field, value in asked.items() if value is not None}


def id_or_token(text: str) -> int | str:
    """Digits are an id: a token that is spelled with digits alone cannot be named."""
    return int(text) if text.isdecimal() else text
