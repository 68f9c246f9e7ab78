"""What all ``dllm`` subcommands share: exit statuses, and the error for mistakes of the user."""

import json
from collections.abc import Mapping
from pathlib import Path

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


class CommandError(Exception):
    """A mistake that the user can correct; the message says what was given and what to do."""


def write_findings(path: Path, found: Mapping[str, object]) -> None:
    """Write what a check found as JSON for scripts (``--json``); the path ``-`` prints it.

    Raises:
        CommandError: it cannot be written there.
    """
    text = json.dumps(found, indent=2) + "\n"
    if str(path) == "-":
        print(text, end="")
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise CommandError(f"--json {path}: {error}") from error
