"""What every ``dllm`` subcommand shares: its exit status, and the error that a user can correct."""

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


class CommandError(Exception):
    """Something that the user can put right; the message says what was given and what to do."""
