"""Reads files of prompts; ``BUNDLED`` is one.

It has a few general prompts: code, maths, extraction, summaries, translation, chat, tool-like
formats, several languages.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

# One prompt of each domain, then the second of each, and so on.
BUNDLED = Path(__file__).parent / "general.jsonl"
BUNDLED_DOMAINS = 12

Message = dict[str, Any]  # as in OpenAI's API


class Conversation(NamedTuple):
    """Messages, the last of which a model answers; and the domain that a file gives them."""

    messages: list[Message]
    domain: str | None = None


def asked(prompt: str) -> Conversation:
    """A conversation of one message."""
    return Conversation([{"role": "user", "content": prompt}])


def read_conversations(file: Path, is_json: bool) -> list[Conversation]:
    """The prompts of a file, in its order; empty lines count for nothing.

    Args:
        is_json: a line is a JSON object with ``prompt`` (a text) or ``messages``, and perhaps
            ``domain``; otherwise it is the prompt itself. Data sets have the answer behind the
            last question; it is left out.

    Raises:
        ValueError: the file cannot be read, or a line is wrong; the message begins with its name
            and the number of the line.
    """
    if not is_json:
        return [asked(line) for line in numbered_lines(file).values()]
    return [_conversation(where, given) for where, given in json_lines(file)]


def numbered_lines(file: Path) -> dict[str, str]:
    """The lines of a file that are not empty, by where they are: ``FILE, line 3``.

    Raises:
        ValueError: the file cannot be read; names it.
    """
    try:
        # Not `splitlines`: JSON may hold other separators of lines as they are.
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: no text in UTF-8 ({error}).") from None
    return {f"{file}, line {number}": line for number, line in enumerate(lines, 1) if line.strip()}


def json_lines(file: Path) -> list[tuple[str, Any]]:
    """The JSON values of a file with one on each line, each behind where it is.

    Raises:
        ValueError: as of ``numbered_lines``, or a line is no JSON.
    """
    found = []
    for where, line in numbered_lines(file).items():
        try:
            found.append((where, json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{where}: no JSON ({error}).") from None
    return found


def _conversation(where: str, given: Any) -> Conversation:
    fields = given if isinstance(given, dict) else {}
    domain = fields.get("domain")
    domain = None if domain is None else str(domain)
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(messages, list) and all(map(_is_message, messages)):
        asks = [number for number, one in enumerate(messages, 1) if one["role"] != "assistant"]
        if asks:
            return Conversation(messages[: asks[-1]], domain)
    if isinstance(prompt, str) and prompt:
        return asked(prompt)._replace(domain=domain)
    raise ValueError(
        f"{where}: {json.dumps(given)[:60]!r}; allowed: "
        '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}.'
    )


def _is_message(given: object) -> bool:
    is_dict = isinstance(given, dict) and isinstance(given.get("role"), str)
    return is_dict and ("content" in given or "tool_calls" in given)  # type: ignore[operator]
