"""The prompts that the model answers during calibration."""

from pathlib import Path

from dllm.settings.command import CommandError
from dllm.tasks.prompts import SHIPPED, Message, asked, knows_suite, read_conversations
from dllm.tasks.suite import FAMILIES, questions


def calibration_prompts(
    file: Path | None, model: Path, samples: int, seed: int
) -> list[list[Message]]:
    """Conversations to calibrate with; the model answers the last message of each.

    Args:
        file: a JSON object on each line (``tasks.prompts``). None takes the shipped general
            prompts; for our small models training questions of the task suite, equally many of
            every family.
        model: the checkpoint that answers.
        samples: how many to take: the first ones of a file, or all if it has fewer.
        seed: of the task suite's questions.

    Raises:
        CommandError: the file cannot be read, or a line is wrong (its number is in the message).
    """
    if file is None and knows_suite(model):
        each = -(-samples // len(FAMILIES))
        suite = questions(FAMILIES, "train", each, seed)
        # Families take turns. In the suite's order, `samples` would cut off the last family.
        turns = [index for first in range(each) for index in range(first, len(suite), each)]
        return [asked(suite[index].prompt).messages for index in turns[:samples]]
    try:
        found = read_conversations(file or SHIPPED, is_json=True)
    except ValueError as error:
        raise CommandError(f"--calibration {error}") from None
    if not found:
        raise CommandError(f"--calibration {file} is empty; it needs one JSON object a line.")
    return [conversation.messages for conversation in found[:samples]]
