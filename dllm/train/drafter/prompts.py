"""What the target is asked: the questions of the task suite, or the lines of a file."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dllm.settings.command import CommandError
from dllm.tasks.suite import FAMILIES, questions
from dllm.tasks.tokenizer import TOKEN_ID, encode_prompt
from dllm.train.drafter.settings import CalibrateSettings

OF_FILE = "prompts"  # the group of prompts that come from a file


@dataclass(frozen=True)
class Prompt:
    """Token ids that the target answers; reports have a line for each ``group``."""

    tokens: tuple[int, ...]
    group: str
    is_heldout: bool


def load_prompts(target: Path, file: Path | None, settings: CalibrateSettings) -> list[Prompt]:
    """Those of a file, or the questions of the task suite if there is none."""
    if file is None:
        return suite_prompts(target, settings)
    return file_prompts(target, file, settings)


def suite_prompts(target: Path, settings: CalibrateSettings) -> list[Prompt]:
    """Training and held-out questions of every family.

    Raises:
        CommandError: the target is not one of our small models, judged by its tokenizer.
    """
    path = target / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None
    if tokenizer is None or any(tokenizer.token_to_id(t) != i for t, i in TOKEN_ID.items()):
        raise CommandError(
            f"{target} is none of our small models, so the task suite means nothing to it: give "
            "its prompts with --prompts FILE (text, one a line, or JSONL)."
        )
    splits = (("heldout", settings.heldout), ("train", settings.responses))
    return [
        Prompt(tuple(encode_prompt(tokenizer, asked.prompt)), asked.family, split == "heldout")
        for split, count in splits
        for asked in questions(FAMILIES, split, count, settings.seed)
    ]


def file_prompts(target: Path, file: Path, settings: CalibrateSettings) -> list[Prompt]:
    """Prompts of a file, with the target's chat template; the first ``heldout`` are held out.

    A line of a text file is a prompt; a line of JSONL is an object with ``prompt`` or ``messages``.

    Raises:
        CommandError: the file cannot be read, a line is wrong, or there are too few.
    """
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise CommandError(f"--prompts {file}: {error.strerror}.") from None
    if len(lines) <= settings.heldout:
        raise CommandError(
            f"--prompts {file}: {len(lines)} prompts, of which heldout = {settings.heldout} are "
            "kept for measuring; allowed: more prompts than that, or a config with fewer held out."
        )
    is_json = file.suffix == ".jsonl"
    chats = [_messages(line, file, number, is_json) for number, line in enumerate(lines, 1)]
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = []
    for index, chat in enumerate(chats[: settings.heldout + settings.responses]):
        if tokenizer.chat_template is None:
            ids = tokenizer(str(chat[-1]["content"]))["input_ids"]
        else:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts.append(Prompt(tuple(ids), OF_FILE, index < settings.heldout))
    return prompts


def _messages(line: str, file: Path, number: int, is_json: bool) -> list[dict[str, object]]:
    if not is_json:
        return [{"role": "user", "content": line}]
    try:
        given = json.loads(line)
    except ValueError as error:
        raise CommandError(f"{file}, line {number}: no JSON ({error}).") from None
    if isinstance(given, dict) and isinstance(given.get("messages"), list) and given["messages"]:
        return given["messages"]
    if isinstance(given, dict) and isinstance(given.get("prompt"), str):
        return [{"role": "user", "content": given["prompt"]}]
    raise CommandError(
        f'{file}, line {number}: {line[:60]!r}; allowed: an object with "prompt" (a string) or '
        '"messages" (a list).'
    )
