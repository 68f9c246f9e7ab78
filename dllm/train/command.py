"""``dllm train drafter``: from a target and prompts to a drafter that vLLM serves beside it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dllm.prompts.files import BUNDLED
from dllm.tools import client
from dllm.train.settings import bundled_configs

# Flags that override a setting of the config: (field, help text).
OVERRIDES = {
    "--num-prompts": ("responses", "prompts to train on, at most"),
    "--heldout": ("heldout", "further prompts to measure on: the first of the file"),
    "--max-tokens": ("max_tokens", "tokens of a response, at most"),
    "--steps": ("steps", "training steps"),
    "--batch-size": ("batch_size", "responses in each step"),
}
OF_RESPONSES = {"responses", "heldout", "max_tokens"}  # which a buffer has already


def main(argv: Sequence[str]) -> int:
    """Calibrate, or go on calibrating, and write the checkpoint to ``OUT/model``.

    Raises:
        CommandError: before any work, when something is missing or wrong.
    """
    given = parse(argv)
    from dllm.train.drafter import train

    return train(given, argv)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dllm train drafter", description=__doc__)
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
    for flag, (field, text) in OVERRIDES.items():
        parser.add_argument(flag, type=int, dest=field, metavar="N", help=text)
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
    asked = {field: getattr(given, field) for field, _ in OVERRIDES.values()}
    given.overrides = {field: value for field, value in asked.items() if value is not None}
    if given.from_buffer and not OF_RESPONSES.isdisjoint(given.overrides):
        parser.error("--from-buffer: its responses are there; leave out the flags about them.")
    return given


def id_or_token(text: str) -> int | str:
    """Digits are an id: a token that is spelled with digits alone cannot be named."""
    return int(text) if text.isdecimal() else text
