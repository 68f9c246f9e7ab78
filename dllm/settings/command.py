"""What all ``dllm`` subcommands share: exit statuses, and the error for mistakes of the user."""

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


class CommandError(Exception):
    """A mistake that the user can correct; the message says what was given and what to do."""
