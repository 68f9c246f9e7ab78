"""How many questions a server answers exactly.

    python -m bench.toys.evaluate --base-url http://127.0.0.1:8000

Typed decisions are scored by ``dllm eval``. accuracy has its Wilson score interval at 95%; tokens,
of a question, include the end-of-sequence token; steps are those of a block, "-" where the model
has none or does not report them.

Denoise steps come from vLLM's counters for diffusion models, read before and after the questions;
vLLM's built-in counts its commit passes, too, and requests of other clients are counted as well.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai

from bench.context import command_line, progress, reporting_failures
from bench.servers import counters
from bench.tables import markdown
from bench.toys.suite import GROUPS, SPLITS, STYLES, Question, questions
from dllm.settings.checks import did_you_mean
from dllm.settings.command import OK, CommandError, new_file, positive
from dllm.tools import client
from dllm.tools.client import Connection, explained

PASSES, POSITIONS = "diffusion_num_denoising_steps", "diffusion_num_canvas_positions"
ALL = "all"
Z_95 = 1.959963984540054  # of the standard normal distribution: 2.5% lie above it
Answered = tuple[Sequence[Question], "Run"]
KNOWN = [family for group in GROUPS.values() for family in group]


@reporting_failures
def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    asked = {family: _questions(family, given) for family in chosen_families(given.tasks)}
    connection = client.connect(given.base_url, given.model, given.api_key)
    model = ServedModel(
        connection, given.max_tokens, given.concurrency, given.temperature, given.seed
    )
    # One family after the other, because a server counts its steps for all requests together.
    answered: dict[str, Answered] = {}
    for family, drawn in asked.items():
        answered[family] = drawn, model.answer(drawn)
        progress(f"{family:<8} {100 * score(answered[family])['accuracy']:5.1f}%")
    scores = {family: score(one) for family, one in answered.items()}
    of_all = score(*answered.values())
    print(f"{model.name}: {given.split} questions, exact answers\n\n{table(scores, of_all)}")
    if given.output:
        settings = {key: value for key, value in sorted(vars(given).items()) if key != "api_key"}
        wrong = [one for each in answered.values() for one in wrong_answers(*each)]
        result: dict[str, Any] = {"model": model.name, "settings": settings, "families": scores}
        result |= {"all": of_all, "wrong": wrong}
        text = json.dumps(result, indent=2, ensure_ascii=False, default=str)  # paths
        given.output.write_text(f"{text}\n")
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
    add("--output", type=new_file, metavar="FILE", help="write all numbers as JSON")
    given = parser.parse_args(argv)
    if given.temperature is not None and not 0 <= given.temperature < float("inf"):
        parser.error(f"--temperature {given.temperature}; allowed: a number of at least 0.")
    return given


def chosen_families(tasks: str) -> list[str]:
    """In the order in which they are defined. Raises CommandError: no such name, or none."""
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if len(names) == 1 and names[0] in GROUPS:
        return list(GROUPS[names[0]])
    for name in names:
        if name not in KNOWN:
            raise CommandError(
                f"--tasks: no family {name!r}{did_you_mean(name, KNOWN)}; "
                f"allowed: {', '.join(GROUPS)}, or some of {', '.join(KNOWN)}."
            )
    if not names:
        raise CommandError(f"--tasks {tasks!r} names no family; allowed: {', '.join(KNOWN)}.")
    return [name for name in KNOWN if name in names]


def _questions(family: str, given: argparse.Namespace) -> list[Question]:
    try:
        found = questions([family], given.split, given.num, given.question_seed)
    except ValueError as error:
        raise CommandError(f"--num {given.num}: {error}") from None
    return [one.in_style(given.style) for one in found]


# --- a server ------------------------------------------------------------------------------------


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


# --- scores --------------------------------------------------------------------------------------


def wilson_interval(num_correct: int, num_questions: int) -> tuple[float, float]:
    """The 95% score interval (low, high) of num_correct / num_questions (Wilson, JASA 22, 1927)."""
    share, n, z = num_correct / num_questions, num_questions, Z_95
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def score(*answered: Answered) -> dict[str, Any]:
    def total(values: list[Any]) -> Any:
        return None if None in values else sum(values)

    def ratio(value: Any, by: Any) -> float | None:
        return None if value is None or not by else value / by

    pairs = [pair for asked, run in answered for pair in zip(asked, run.answers, strict=True)]
    right = sum(asked.is_correct(answer.text) for asked, answer in pairs)
    tokens = total([answer.num_tokens for _, answer in pairs])
    steps, blocks = (
        total([getattr(run, name) for _, run in answered]) for name in ("denoise_steps", "blocks")
    )
    seconds = sum(run.seconds for _, run in answered)
    return {
        "num_questions": len(pairs),
        "num_correct": right,
        "accuracy": right / len(pairs),
        "interval_95": list(wilson_interval(right, len(pairs))),
        "mean_output_tokens": ratio(tokens, len(pairs)),
        "denoise_steps": steps,
        "blocks": blocks,
        "denoise_steps_per_block": ratio(steps, blocks),
        "output_tokens_per_step": ratio(tokens, steps),
        "seconds": seconds,
        "output_tokens_per_s": ratio(tokens, seconds),
    }


def wrong_answers(questions: Sequence[Question], run: Run) -> list[dict[str, Any]]:
    told = [
        {"place": place, "family": one.family, "prompt": one.prompt, "expected": one.answer}
        for place, one in enumerate(questions)
    ]
    pairs = zip(questions, told, run.answers, strict=True)
    return [line | {"given": a.text} for one, line, a in pairs if not one.is_correct(a.text)]


def table(scores: dict[str, dict[str, Any]], of_all: dict[str, Any]) -> str:
    def shown(value: float | None, decimals: int = 1) -> str:
        return "-" if value is None else f"{value:.{decimals}f}"

    def cells(name: str, one: dict[str, Any]) -> list[str]:
        low, high = one["interval_95"]
        share = f"{100 * one['accuracy']:.1f}%", f"{100 * low:.1f}-{100 * high:.1f}"
        tokens, steps = one["mean_output_tokens"], one["denoise_steps_per_block"]
        right = f"{one['num_correct']}/{one['num_questions']}"
        speed = shown(one["seconds"]), shown(one["output_tokens_per_s"])
        return [name, right, *share, shown(tokens), shown(steps, 2), *speed]

    header = ["family", "right", "accuracy", "95%", "tokens", "steps", "s", "tokens/s"]
    rows = [*scores.items(), *[("all", of_all)] * (len(scores) > 1)]
    return markdown(header, [cells(*row) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
