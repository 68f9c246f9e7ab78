"""What the commands that race servers have in common: flags, refusals, exit codes."""

import argparse
import functools
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from bench.measure import GateError


class Main(Protocol):
    """What runs a command: arguments without the program's name, ``sys.argv`` if None."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """The exit code."""


SERVE_FLAGS = ("--kv-cache-memory-bytes", "256M", "--max-model-len", "1024")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """``--serve-flags``, a list of strings."""
    parser.add_argument(
        "--serve-flags",
        type=shlex.split,
        default=list(SERVE_FLAGS),
        help="of all servers, in one string",
    )


def canvas_length(parser: argparse.ArgumentParser, model: Path) -> int:
    """Tokens of the checkpoint's canvas; exits with a message where there is no checkpoint."""
    config = model / "config.json"
    if not config.exists():
        parser.error(f"--model {model}: no config.json there; give a checkpoint's folder.")
    return int(json.loads(config.read_text())["canvas_length"])


def reporting_failures(main: Main) -> Main:
    """A ``main`` that prints why there is no speed: exit code 1 for wrong outputs, 2 otherwise.

    Ended by SIGTERM it stops its servers, some of which stand still (``bench.race.undisturbed``).
    """

    @functools.wraps(main)
    def guarded(arguments: Sequence[str] | None = None) -> int:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            return main(arguments)
        except GateError as error:
            print(f"No speed is reported, because outputs are wrong:\n{error}", file=sys.stderr)
            return 1
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2

    return guarded
