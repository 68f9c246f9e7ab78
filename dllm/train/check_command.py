"""``dllm check-drafter``: does a drafter fit its target."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dllm.prompts.files import BUNDLED

NUM_PROMPTS = 10
MAX_TOKENS = 96


def main(argv: Sequence[str]) -> int:
    """Check a pair. Exit status 0: it fits; 1: it does not.

    Raises:
        CommandError: a server would refuse it, or nothing can be measured.
    """
    given = parse(argv)
    from dllm.train.check import check

    return check(given)


def parse(argv: Sequence[str]) -> argparse.Namespace:
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
