"""``dllm recalibrate``: goes on training a server's drafter on its traffic, beside the server.

Each round trains for a few hundred steps on what the server has recorded (``record``). If more
drafts of the held-out part of the recording are then accepted, the drafter is published in a
folder, which the server watches (``renew``). It runs at the lowest priority and stops with Ctrl-C.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dllm.settings.command import positive


def main(argv: Sequence[str]) -> int:
    given = parse(argv)
    from dllm.train.recalibrate import recalibrate

    return recalibrate(given)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dllm recalibrate", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--drafter", type=Path, required=True, help="that the server started with")
    parser.add_argument("--buffer", type=Path, required=True, help="the server's `record` folder")
    parser.add_argument("--out", type=Path, required=True, help="the server's `renew` folder")
    parser.add_argument("--steps", type=positive, default=200, help="training steps of a round")
    parser.add_argument("--rounds", type=positive, help="stop after so many; default: go on")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(argv)
