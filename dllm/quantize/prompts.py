"""What the model is asked while the scales of its inputs are measured."""

import json
from pathlib import Path

from dllm.settings.command import CommandError
from dllm.tasks.suite import FAMILIES, questions

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


def calibration_prompts(file: Path | None, samples: int, seed: int) -> list[list[Message]]:
    """Conversations that end with something to answer.

    Args:
        file: one JSON object a line, with ``prompt`` (a text) or ``messages`` (OpenAI's); None asks
            the task suite's training questions, of every family alike.
        samples: how many are used; a file may hold fewer, and its first ones are taken.
        seed: of the task suite.

    Raises:
        CommandError: the file cannot be read; names the line.
    """
    if file is None:
        each = -(-samples // len(FAMILIES))
        asked = questions(FAMILIES, "train", each, seed)
        # Family after family would leave the last ones out.
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
