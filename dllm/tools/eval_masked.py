"""Answers questions with a SDAR or a LLaDA2 in transformers: the plain loop of ``reference``."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from dllm.models.unmasking.reference import DecodingRule, generate_blocks, load_model
from dllm.models.unmasking.rule import DYNAMIC, STRATEGIES
from dllm.settings.command import CommandError
from dllm.tasks.suite import Question
from dllm.tools.eval_report import Answer, Run


class MaskedReference:
    """A checkpoint of masked blocks in transformers, in fp32; it asks one question at a time.

    Args:
        path: the checkpoint's folder.
        max_tokens: of an answer, rounded up to the end of a block.
        temperature: 0 or None; both mean the most probable tokens.

    Raises:
        CommandError: another temperature, or a checkpoint that a server decodes by another rule.
    """

    def __init__(self, path: Path, max_tokens: int, temperature: float | None = None) -> None:
        if temperature:
            raise CommandError(
                f"--temperature {temperature}: the reference of this model takes the most probable "
                "tokens; allowed: 0, or leave it out."
            )
        disable_progress_bar()
        self.name = f"{path} in transformers"
        self.model = load_model(path)
        self.rule = DecodingRule.of_checkpoint(path)
        refuse_other_rules(path, self.rule.block_size)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.max_tokens = max_tokens

    def answer(self, questions: Sequence[Question], on_answer: Callable[[], None]) -> Run:
        """Generate an answer to each question; ``on_answer`` is called after each."""
        start = time.monotonic()
        answers, num_steps, num_blocks = [], 0, 0
        for question in questions:
            ids = prompt_ids(self.tokenizer, question)
            generated = generate_blocks(self.model, [ids], self.rule, self.max_tokens)
            tokens = generated.answers[0]
            answers.append(cut_answer(self.tokenizer, question, tokens, self.rule.stop_ids))
            num_steps += generated.num_steps
            num_blocks += generated.num_blocks
            on_answer()
        return Run(answers, time.monotonic() - start, num_steps, num_blocks)


def refuse_other_rules(path: Path, block_size: int) -> None:
    """Refuse fields of generation_config.json that a server obeys and the plain loop does not know.

    Raises:
        CommandError: the name of the field.
    """
    file = path / "generation_config.json"
    given = json.loads(file.read_text()) if file.exists() else {}
    dynamic = STRATEGIES[DYNAMIC]
    if (given.get("remasking_strategy") or dynamic) != dynamic:
        name, allowed = "remasking_strategy", dynamic
    elif (given.get("max_denoising_steps") or block_size) < block_size:
        name, allowed = "max_denoising_steps", f"at least {block_size}, the size of a block"
    else:
        return
    raise CommandError(
        f"--reference {path}: generation_config.json has {name} = {given[name]!r}, which the "
        f"reference of this model does not know; allowed: {allowed}."
    )


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    """A question as the chat template writes it, with the tools that it lists."""
    chat = question.chat
    options = {} if chat is None else {"tools": chat.schemas or None} | chat.template_kwargs
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": question.prompt}],
        add_generation_prompt=True,
        return_dict=False,
        **options,
    )
    return ids


def cut_answer(
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    tokens: Sequence[int],
    stops: Collection[int],
) -> Answer:
    """The text in front of the first stop token, and the number of tokens up to it, it included.

    Special tokens stay in the text if the question has a chat: its answers hold marks.
    """
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    text = tokenizer.decode(tokens[:end], skip_special_tokens=question.chat is None)
    return Answer(text, min(end + 1, len(tokens)))
