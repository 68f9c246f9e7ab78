"""What all ``dllm`` subcommands share: exit statuses, and the error for mistakes of the user."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


class CommandError(Exception):
    """A mistake that the user can correct; the message says what was given and what to do."""


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; allowed: an integer of at least 1.")
    return value


def new_file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent}.")
    return path


def write_findings(path: Path, found: Mapping[str, object]) -> None:
    """JSON for scripts (``--json``); the path ``-`` prints it. Raises CommandError if it fails."""
    text = json.dumps(found, indent=2) + "\n"
    if str(path) == "-":
        print(text, end="")
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise CommandError(f"--json {path}: {error}") from error
