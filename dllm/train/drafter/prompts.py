"""What the target is asked: the lines of a file, or the questions of the task suite.

``SHIPPED`` is a small file of general prompts (code, maths, extraction, summaries, translation,
chat, tool-like formats, several languages). It is enough to try a calibration and to check a
drafter; a drafter that is to be used needs thousands of prompts like its own traffic.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dllm.settings.command import CommandError
from dllm.tasks.suite import FAMILIES, questions
from dllm.tasks.tokenizer import TOKEN_ID, encode_prompt
from dllm.train.drafter.settings import CalibrateSettings

OF_FILE = "prompts"  # the group of a file's prompts that name no domain
# One prompt of each domain, then the second of each, and so on.
SHIPPED = Path(__file__).parent / "data" / "prompts.jsonl"
SHIPPED_DOMAINS = 12


@dataclass(frozen=True)
class Prompt:
    """Token ids that the target answers; reports have a line for each ``group``."""

    tokens: tuple[int, ...]
    group: str
    is_heldout: bool


def default_file(target: Path) -> Path | None:
    """Where prompts come from unless a file is given; None: from the task suite."""
    return None if knows_suite(target) else SHIPPED


def load_prompts(target: Path, file: Path | None, settings: CalibrateSettings) -> list[Prompt]:
    """Those of a file, or the questions of the task suite if there is none.

    Of ``SHIPPED`` at most one prompt of each domain is held out.
    """
    if file is None:
        return suite_prompts(target, settings)
    if file == SHIPPED:
        settings = replace(settings, heldout=min(settings.heldout, SHIPPED_DOMAINS))
    return file_prompts(target, file, settings)


def suite_prompts(target: Path, settings: CalibrateSettings) -> list[Prompt]:
    """Training and held-out questions of every family.

    Raises:
        CommandError: the target is not one of our small models.
    """
    if not knows_suite(target):
        raise CommandError(
            f"{target} is none of our small models, so the task suite means nothing to it: give "
            "its prompts with --prompts FILE (text, one a line, or JSONL)."
        )
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    splits = (("heldout", settings.heldout), ("train", settings.responses))
    return [
        Prompt(tuple(encode_prompt(tokenizer, asked.prompt)), asked.family, split == "heldout")
        for split, count in splits
        for asked in questions(FAMILIES, split, count, settings.seed)
    ]


def knows_suite(target: Path) -> bool:
    """Whether a target is one of our small models, judged by its tokenizer."""
    path = target / "tokenizer.json"
    if not path.exists():
        return False
    tokenizer = Tokenizer.from_file(str(path))
    return all(tokenizer.token_to_id(token) == index for token, index in TOKEN_ID.items())


def file_prompts(target: Path, file: Path, settings: CalibrateSettings) -> list[Prompt]:
    """Prompts of a file, with the target's chat template; the first ``heldout`` are held out.

    A line of a text file is a prompt; a line of JSONL is an object with ``prompt`` or ``messages``,
    and perhaps ``domain``, which becomes the prompt's group.

    Raises:
        CommandError: the file cannot be read, a line is wrong, there are too few, or the target has
            no tokenizer.
    """
    try:
        numbered = list(enumerate(file.read_text().splitlines(), 1))
    except OSError as error:
        raise CommandError(f"--prompts {file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CommandError(f"--prompts {file}: no text in UTF-8 ({error}).") from None
    lines = [(number, line) for number, line in numbered if line.strip()]
    if len(lines) <= settings.heldout:
        raise CommandError(
            f"--prompts {file}: {len(lines)} prompts, of which heldout = {settings.heldout} are "
            "kept for measuring; allowed: more prompts than that, or a config with fewer held out."
        )
    is_json = file.suffix == ".jsonl"
    chats = [_read_line(line, file, number, is_json) for number, line in lines]
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = []
    for index, (chat, domain) in enumerate(chats[: settings.heldout + settings.responses]):
        if tokenizer.chat_template is None:
            ids = tokenizer(str(chat[-1]["content"]))["input_ids"]
        else:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:  # what transformers makes of a target without a tokenizer's files
            raise CommandError(
                f"{file}: the tokenizer of {target} makes no tokens of prompt {index + 1}; give a "
                "target that has one (tokenizer.json)."
            )
        prompts.append(Prompt(tuple(ids), domain, index < settings.heldout))
    return prompts


def _read_line(
    line: str, file: Path, number: int, is_json: bool
) -> tuple[list[dict[str, object]], str]:
    """The messages of a line, and its domain."""
    if not is_json:
        return [{"role": "user", "content": line}], OF_FILE
    try:
        given = json.loads(line)
    except ValueError as error:
        raise CommandError(f"{file}, line {number}: no JSON ({error}).") from None
    if isinstance(given, dict):
        domain = str(given.get("domain", OF_FILE))
        if isinstance(given.get("messages"), list) and given["messages"]:
            return given["messages"], domain
        if isinstance(given.get("prompt"), str):
            return [{"role": "user", "content": given["prompt"]}], domain
    raise CommandError(
        f'{file}, line {number}: {line[:60]!r}; allowed: an object with "prompt" (a string) or '
        '"messages" (a list).'
    )
