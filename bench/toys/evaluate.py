"""How many questions a server answers exactly.

    python -m bench.toys.evaluate --base-url http://127.0.0.1:8000

Typed decisions are scored by ``dllm eval``. accuracy has its Wilson score interval at 95%; tokens,
of a question, include the end-of-sequence token; steps are those of a block, "-" where the model
has none or does not report them.

Denoise steps come from vLLM's counters for diffusion models, read before and after the questions;
vLLM's built-in counts its commit passes, too, and requests of other clients are counted as well.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai

from bench.context import command_line, progress, reporting_failures
from bench.servers import counters
from bench.tables import markdown
from bench.toys.suite import GROUPS, SPLITS, STYLES, Question, questions
from dllm.settings.command import OK, CommandError, positive
from dllm.tools import client
from dllm.tools.client import Connection, explained

PASSES, POSITIONS = "diffusion_num_denoising_steps", "diffusion_num_canvas_positions"
ALL = "all"
Z_95 = 1.959963984540054  # of the standard normal distribution: 2.5% lie above it
Answered = tuple[Sequence[Question], "Run"]
HEADER = ["family", "right", "accuracy", "95%", "tokens", "steps"]
HEADER += ["tokens a step", "s", "tokens/s"]
KNOWN = [family for group in GROUPS.values() for family in group]


@reporting_failures
def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    drawn = {
        family: questions([family], given.split, given.num, given.question_seed)
        for family in chosen_families(given.tasks)
    }
    connection = client.connect(given.base_url, given.model, given.api_key)
    model = ServedModel(
        connection, given.max_tokens, given.concurrency, given.temperature, given.seed
    )
    # One family after the other, because a server counts its steps for all requests together.
    answered: dict[str, Answered] = {}
    for family, plain in drawn.items():
        asked = [one.in_style(given.style) for one in plain]
        answered[family] = asked, model.answer(asked)
        progress(" ".join(line(family, answered[family])[:3]))
    lines = [line(family, one) for family, one in answered.items()]
    lines += [line("all", *answered.values())] * (len(lines) > 1)
    served = f"{connection.model} at {connection.url}"
    print(f"{served}: {given.split} questions, exact answers\n\n{markdown(HEADER, lines)}")
    return OK


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, writes=False)
    client.add_arguments(parser)
    add, groups = parser.add_argument, (f"{k}: {', '.join(group)}" for k, group in GROUPS.items())
    add("--tasks", default=ALL, help="; ".join((*groups, "or names (all)")))
    add("--num", type=positive, default=200, help="questions a family (200)")
    add("--split", choices=SPLITS, default="heldout", help="(heldout)")
    add("--style", choices=STYLES, help="of a right answer, as an adapter gives it")
    add("--question-seed", type=int, default=0, help="of the questions (0)")
    add("--seed", type=int, help="of request i is SEED + i; default: none is sent")
    add("--temperature", type=float, help="default: the model's; 0 suits autoregressive models")
    add("--max-tokens", type=positive, default=128, help="of an answer (128)")
    add("--concurrency", type=positive, default=8, help="requests at once (8)")
    given = parser.parse_args(argv)
    if given.temperature is not None and not 0 <= given.temperature < float("inf"):
        parser.error(f"--temperature {given.temperature}; allowed: a number of at least 0.")
    return given


def chosen_families(tasks: str) -> list[str]:
    """In the order in which they are defined. Raises CommandError: no such name, or none."""
    names = GROUPS.get(tasks) or [name.strip() for name in tasks.split(",")]
    if not set(names) <= set(KNOWN):
        allowed = f"{', '.join(GROUPS)}, or some of {', '.join(KNOWN)}"
        raise CommandError(f"--tasks {tasks!r}; allowed: {allowed}.")
    return [name for name in KNOWN if name in names]


@dataclass(frozen=True)
class Answer:
    text: str
    num_tokens: int


@dataclass(frozen=True)
class Run:
    """The answers to a list of questions."""

    answers: Sequence[Answer]
    seconds: float  # wall time of all of them
    # Sums over all; 0 if the model has none or does not report them.
    denoise_steps: int
    blocks: int


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
        assert completion.usage is not None
        text = completion.choices[0].message.content or ""
        return Answer(text, completion.usage.completion_tokens)


def read_metrics(connection: Connection) -> str:
    """Empty if it has none. Raises CommandError: the server does not answer any more."""
    with explained(connection.url):
        try:
            return connection.client.get(f"{connection.url}/metrics", cast_to=str)
        except openai.APIStatusError:
            return ""


def denoise_counts(before: str, after: str, answers: Sequence[Answer]) -> tuple[int, int]:
    """(canvas passes between two readings of the metrics, blocks of these answers).

    An answer's blocks are its tokens / canvas width, rounded up; the width is canvas positions /
    passes. 0: the server has no such counters; of blocks also if canvases differed in width, as of
    models with blocks.
    """
    counted = counters(after)
    counted.subtract(counters(before))
    passes, positions = int(counted[PASSES]), int(counted[POSITIONS])
    if not passes or positions % passes:
        return passes, 0
    width = positions // passes
    return passes, sum(math.ceil(answer.num_tokens / width) for answer in answers)


def wilson_interval(num_correct: int, num_questions: int) -> tuple[float, float]:
    """The 95% score interval (low, high) of num_correct / num_questions (Wilson, JASA 22, 1927)."""
    share, n, z = num_correct / num_questions, num_questions, Z_95
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def line(name: str, *answered: Answered) -> list[str]:
    """Of the table, whose columns are ``HEADER``."""

    def ratio(value: float, by: float, decimals: int = 1) -> str:
        return f"{value / by:.{decimals}f}" if by else "-"

    pairs = [pair for asked, run in answered for pair in zip(asked, run.answers, strict=True)]
    runs, count = [run for _, run in answered], len(pairs)
    right = sum(asked.is_correct(answer.text) for asked, answer in pairs)
    tokens = sum(answer.num_tokens for _, answer in pairs)
    steps, seconds = sum(run.denoise_steps for run in runs), sum(run.seconds for run in runs)
    low, high = (100 * end for end in wilson_interval(right, count))
    share = f"{ratio(100 * right, count)}%", f"{low:.1f}-{high:.1f}"
    steps_a_block = ratio(steps, sum(run.blocks for run in runs), 2)
    speed = ratio(tokens, steps, 2), f"{seconds:.1f}", ratio(tokens, seconds)
    return [name, f"{right}/{count}", *share, ratio(tokens, count), steps_a_block, *speed]


if __name__ == "__main__":
    sys.exit(main())
