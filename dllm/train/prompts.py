"""What the target is asked: the lines of a file.

The bundled prompts are enough to try a calibration and to check a drafter; a drafter that is to be
used needs thousands of prompts like its own traffic.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer

from dllm.prompts.files import BUNDLED, BUNDLED_DOMAINS, read_conversations
from dllm.settings.command import CommandError
from dllm.train.settings import DrafterTraining

OF_FILE = "prompts"  # the group of a file's prompts that name no domain


@dataclass(frozen=True)
class Prompt:
    """Token ids that the target answers; reports have a line for each ``group``."""

    tokens: tuple[int, ...]
    group: str
    is_heldout: bool


def load_prompts(target: Path, file: Path, settings: DrafterTraining) -> list[Prompt]:
    """Prompts of a file, with the target's chat template; the first ``heldout`` are held out.

    A line of a text file is a prompt; a line of JSONL is an object with ``prompt`` or ``messages``,
    and perhaps ``domain``, which becomes the prompt's group. Of ``BUNDLED`` at most one prompt of
    each domain is held out.

    Raises:
        CommandError: the file cannot be read, a line is wrong, there are too few, or the target has
            no tokenizer.
    """
    if file == BUNDLED:
        settings = replace(settings, heldout=min(settings.heldout, BUNDLED_DOMAINS))
    try:
        chats = read_conversations(file, is_json=file.suffix == ".jsonl")
    except ValueError as error:
        raise CommandError(f"--prompts {error}") from None
    if len(chats) <= settings.heldout:
        raise CommandError(
            f"--prompts {file}: {len(chats)} prompts, of which heldout = {settings.heldout} are "
            "kept for measuring; allowed: more prompts than that, or a config with fewer held out."
        )
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = []
    for index, (chat, domain) in enumerate(chats[: settings.heldout + settings.responses]):
        if tokenizer.chat_template is None:
            ids = tokenizer(str(chat[-1].get("content")))["input_ids"]
        else:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:  # what transformers makes of a target without a tokenizer's files
            raise CommandError(
                f"{file}: the tokenizer of {target} makes no tokens of prompt {index + 1}; give a "
                "target that has one (tokenizer.json)."
            )
        prompts.append(Prompt(tuple(ids), domain or OF_FILE, index < settings.heldout))
    return prompts
