"""``dllm train pilot``: hands the command line to what trains a pilot."""

from collections.abc import Sequence

from dllm.settings.command import CommandError


def main(argv: Sequence[str]) -> int:
    """``dllm train pilot ...``.

    Raises:
        CommandError: something else is to be trained.
    """
    if argv[:1] != ["pilot"]:
        raise CommandError("allowed: dllm train pilot; --help behind it says what it takes.")
    from dllm.train.pilot.command import main as train_pilot  # imports vLLM: seconds

    return train_pilot(argv[1:])
