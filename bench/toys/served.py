"""Answers questions through the chat endpoint of any OpenAI-compatible server.

Denoise steps come from vLLM's counters for diffusion models, read before and after the questions;
vLLM's built-in counts its commit passes, too, and requests of other clients are counted as well.
"""

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai

from bench.servers import counters
from bench.toys.suite import Question
from dllm.tools.client import Connection, explained

PASSES, POSITIONS = "diffusion_num_denoising_steps", "diffusion_num_canvas_positions"


@dataclass(frozen=True)
class Answer:
    text: str
    num_tokens: int | None  # None if the server does not report it


@dataclass(frozen=True)
class Run:
    """The answers to a list of questions, which were asked one after the other or concurrently."""

    answers: Sequence[Answer]
    seconds: float  # wall time of all of them
    # Sums over all; None if the model has none or does not report them.
    denoise_steps: int | None = None
    blocks: int | None = None


@dataclass(frozen=True)
class ServedModel:
    """A model on a server.

    ``temperature`` and ``seed + i`` of question i are sent with it; None leaves them to the server.
    """

    connection: Connection
    max_tokens: int
    concurrency: int
    temperature: float | None = None
    seed: int | None = None

    @property
    def name(self) -> str:
        return f"{self.connection.model} at {self.connection.url}"

    def answer(self, questions: Sequence[Question]) -> Run:
        """``concurrency`` at a time. Raises CommandError: the server failed or refused one."""
        before = read_metrics(self.connection)
        start = time.monotonic()
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            with explained(self.connection.url):
                answers = list(pool.map(self._ask, questions, range(len(questions))))
        finally:
            pool.shutdown(cancel_futures=True)
        seconds = time.monotonic() - start
        passes, blocks = denoise_counts(before, read_metrics(self.connection), answers)
        return Run(answers, seconds, passes, blocks)

    def _ask(self, question: Question, index: int) -> Answer:
        completion = self.connection.client.chat.completions.create(
            model=self.connection.model,
            messages=[{"role": "user", "content": question.prompt}],
            max_tokens=self.max_tokens,
            temperature=openai.omit if self.temperature is None else self.temperature,
            seed=openai.omit if self.seed is None else self.seed + index,
            extra_body=None if question.chat is None else question.chat.request,
        )
        usage = completion.usage
        text = completion.choices[0].message.content or ""
        return Answer(text, None if usage is None else usage.completion_tokens)


def read_metrics(connection: Connection) -> str:
    """Empty if it has none. Raises CommandError: the server does not answer any more."""
    with explained(connection.url):
        try:
            return connection.client.get(f"{connection.url}/metrics", cast_to=str)
        except openai.APIStatusError:
            return ""


def denoise_counts(
    before: str, after: str, answers: Sequence[Answer]
) -> tuple[int | None, int | None]:
    """(canvas passes between two readings of the metrics, blocks of these answers).

    An answer's blocks are its tokens / canvas width, rounded up; the width is canvas positions /
    passes. None: the server has no such counters; of blocks also if it does not report the answers'
    tokens, or if canvases differed in width, as of models with blocks.
    """
    counted = counters(after)
    counted.subtract(counters(before))
    passes, positions = counted[PASSES], counted[POSITIONS]
    lengths = [answer.num_tokens for answer in answers if answer.num_tokens is not None]
    if not passes:
        return None, None
    if positions % passes or len(lengths) < len(answers):
        return int(passes), None
    width = positions / passes
    return int(passes), sum(math.ceil(length / width) for length in lengths)
