"""The prompts that the model answers during calibration."""

import json
from pathlib import Path

from dllm.settings.command import CommandError
from dllm.tasks.suite import FAMILIES, questions

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


def calibration_prompts(file: Path | None, samples: int, seed: int) -> list[list[Message]]:
    """Conversations to calibrate with; the model answers the last message of each.

    Args:
        file: a JSON object on each line, with ``prompt`` (a text) or ``messages`` (as in OpenAI's
            API). None takes training questions of the task suite, equally many of every family.
        samples: how many to take: the first ones of the file, or all if it has fewer.
        seed: of the task suite's questions.

    Raises:
        CommandError: the file cannot be read, or a line is wrong (its number is in the message).
    """
    if file is None:
        each = -(-samples // len(FAMILIES))
        asked = questions(FAMILIES, "train", each, seed)
        # Families take turns. In the suite's order, `samples` would cut off the last family.
        return [[_user(asked[i].prompt)] for i in _interleaved(len(asked), each)][:samples]
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--calibration {file}: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise CommandError(f"--calibration {file} is empty; it needs one JSON object a line.")
    return [_conversation(f"{file}:{number}", line) for number, line in numbered[:samples]]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _interleaved(count: int, each: int) -> list[int]:
    """Indices 0, each, 2 * each, ..., then 1, each + 1, ..."""
    return [index for first in range(each) for index in range(first, count, each)]


def _conversation(where: str, line: str) -> list[Message]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise CommandError(f"--calibration {where} is no JSON ({error}).") from error
    if isinstance(value, dict) and isinstance(value.get("prompt"), str) and value["prompt"]:
        return [_user(value["prompt"])]
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    raise CommandError(
        f'--calibration {where}: expected {{"prompt": "..."}} or {{"messages": [{{"role": '
        f'"user", "content": "..."}}]}} (roles: {", ".join(ROLES)}), given {line[:80]!r}.'
    )


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ROLES
        and isinstance(value.get("content"), str)
    )
