"""Answers questions with a SDAR or a LLaDA2 in transformers: the plain loop of ``reference``."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from dllm.models.unmasking.reference import DecodingRule, generate_blocks, load_model
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
        CommandError: another temperature.
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
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.max_tokens = max_tokens

    def answer(self, questions: Sequence[Question], on_answer: Callable[[], None]) -> Run:
        """Generate an answer to each question; ``on_answer`` is called after each."""
        start = time.monotonic()
        answers, num_steps, num_blocks = [], 0, 0
        for question in questions:
            ids = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": question.prompt}],
                add_generation_prompt=True,
                return_dict=False,
            )
            generated = generate_blocks(self.model, [ids], self.rule, self.max_tokens)
            answers.append(self._cut(generated.answers[0]))
            num_steps += generated.num_steps
            num_blocks += generated.num_blocks
            on_answer()
        return Run(answers, time.monotonic() - start, num_steps, num_blocks)

    def _cut(self, tokens: list[int]) -> Answer:
        """The text up to the first stop token, and its length with it."""
        stops = (i + 1 for i, token in enumerate(tokens) if token in self.rule.stop_ids)
        length = next(stops, len(tokens))
        return Answer(self.tokenizer.decode(tokens[:length], skip_special_tokens=True), length)
