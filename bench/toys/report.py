"""Scores of answered questions, as a table and as JSON.

accuracy      right answers / questions, with the Wilson score interval at 95%
tokens        output tokens for each question, the end-of-sequence token included
steps         denoise steps / blocks; "-" where the model has none or does not report them
tokens/s      output tokens of all questions / wall time of all questions
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from bench.tables import markdown
from bench.toys.suite import Question

Z_95 = 1.959963984540054  # of the standard normal distribution: 2.5% lie above it


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
class Score:
    """The scores of one family of questions, or of all families together; None as in ``Run``."""

    name: str
    num_questions: int
    num_correct: int
    num_tokens: int | None
    seconds: float
    denoise_steps: int | None
    blocks: int | None

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_questions

    def to_mapping(self) -> dict[str, Any]:
        return {
            "num_questions": self.num_questions,
            "num_correct": self.num_correct,
            "accuracy": self.accuracy,
            "interval_95": list(wilson_interval(self.num_correct, self.num_questions)),
            "mean_output_tokens": _ratio(self.num_tokens, self.num_questions),
            "denoise_steps": self.denoise_steps,
            "blocks": self.blocks,
            "denoise_steps_per_block": _ratio(self.denoise_steps, self.blocks),
            "output_tokens_per_step": _ratio(self.num_tokens, self.denoise_steps),
            "seconds": self.seconds,
            "output_tokens_per_s": _ratio(self.num_tokens, self.seconds),
        }


def wilson_interval(num_correct: int, num_questions: int) -> tuple[float, float]:
    """The 95% score interval (low, high) of num_correct / num_questions (Wilson, JASA 22, 1927)."""
    share, n, z = num_correct / num_questions, num_questions, Z_95
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def score(name: str, questions: Sequence[Question], run: Run) -> Score:
    pairs = list(zip(questions, run.answers, strict=True))
    return Score(
        name,
        num_questions=len(pairs),
        num_correct=sum(question.is_correct(answer.text) for question, answer in pairs),
        num_tokens=_sum([answer.num_tokens for answer in run.answers]),
        seconds=run.seconds,
        denoise_steps=run.denoise_steps,
        blocks=run.blocks,
    )


def total(scores: Sequence[Score]) -> Score:
    _, *columns = zip(*map(astuple, scores), strict=True)
    return Score("all", *map(_sum, columns))  # type: ignore[arg-type]


def wrong_answers(questions: Sequence[Question], run: Run) -> list[dict[str, Any]]:
    """For each wrong answer: its question's place, family and prompt, a right answer, itself."""
    return [
        {
            "place": place,
            "family": question.family,
            "prompt": question.prompt,
            "expected": question.answer,
            "given": answer.text,
        }
        for place, (question, answer) in enumerate(zip(questions, run.answers, strict=True))
        if not question.is_correct(answer.text)
    ]


def table(scores: Sequence[Score]) -> str:
    """A row for each family, and one for all if there are several. Steps are those of a block."""
    header = ["family", "right", "accuracy", "95%", "tokens", "steps", "s", "tokens/s"]
    rows = [*scores, total(scores)] if len(scores) > 1 else scores
    return markdown(header, [_cells(one) for one in rows])


def _cells(one: Score) -> list[str]:
    found = one.to_mapping()
    low, high = found["interval_95"]
    return [
        one.name,
        f"{one.num_correct}/{one.num_questions}",
        f"{100 * one.accuracy:.1f}%",
        f"{100 * low:.1f}-{100 * high:.1f}",
        _shown(found["mean_output_tokens"]),
        _shown(found["denoise_steps_per_block"], 2),
        f"{one.seconds:.1f}",
        _shown(found["output_tokens_per_s"]),
    ]


def _shown(value: float | None, decimals: int = 1) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _sum(values: Sequence[Any]) -> Any:
    """The sum; None if any value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _ratio(value: int | None, by: float | None) -> float | None:
    """value / by; None if either is unknown, or ``by`` is 0."""
    return None if value is None or not by else value / by
