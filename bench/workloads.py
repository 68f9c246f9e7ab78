"""What a run asks for, and whether it was answered rightly.

Two schedules, each with the prompts that it makes sense for:

    adaptive  held-out questions of the task suite (``dllm/tasks/suite.py``), as many of each
              family, as chat messages. Answers end where the model ends them, and blocks stop when
              they converge.
    fixed     random tokens, answered with exactly as many tokens as asked for. Every block takes
              the same number of denoise steps, so this measures what a pass costs.

A workload's prompts are new in every round, those of another workload are others, and all
contestants of a round get the same.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dllm.tasks.suite import FAMILIES, Question, questions
from dllm.tools.eval_report import wilson_interval

ADAPTIVE, FIXED = "adaptive", "fixed"
ANSWER_TOKENS = 128  # at most, of an answer to a question; right ones are shorter
NUM_WARMUPS = 2

# Answers to `report` take two canvases of the bundled model. The built-in reads generated blocks in
# another way than the reference, gets a third of them wrong, and would have no speed at all.
ONE_BLOCK = tuple(family for family in FAMILIES if family != "report")
MIXED = "mixed"

# So few right answers must be at least this probable, if the model answers as its card says.
WRONG_BELOW = 1e-4


@dataclass(frozen=True)
class Shape:
    """Sizes that all workloads of a command share, in tokens; the last two are of random prompts.

    Raises:
        ValueError: ``output_len`` is not a multiple of ``canvas_length``.
    """

    canvas_length: int
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        if self.output_len % self.canvas_length:
            raise ValueError(
                f"--output-len {self.output_len} must be a multiple of the canvas length "
                f"{self.canvas_length}: a block that is cut costs as much as a whole one."
            )

    @property
    def prompt(self) -> list[int]:
        """Token ids of a prompt of ``input_len``."""
        return [20 + position % 100 for position in range(self.input_len)]


@dataclass(frozen=True)
class Workload:
    """One run.

    Attributes:
        schedule: ADAPTIVE or FIXED.
        concurrency: requests in flight; each answer is followed by the next request.
        rate: instead, requests per second, arriving at random (Poisson) whatever is in flight.
        steps_per_block: what every block must take; None leaves it to the model.
        sent: JSON merged into every request (``--extra-body``), for arguments of ours.
        families: of the questions.
    """

    schedule: str
    num_requests: int
    shape: Shape
    concurrency: int | None = None
    rate: float | None = None
    steps_per_block: int | None = None
    sent: str = ""
    families: tuple[str, ...] = ONE_BLOCK

    @property
    def family(self) -> str:
        """The only one, or ``mixed``."""
        return self.families[0] if len(self.families) == 1 else MIXED

    @property
    def load(self) -> str:
        """``8 at once`` or ``4 per s``."""
        return f"{self.rate:g} per s" if self.rate else f"{self.concurrency} at once"

    @property
    def name(self) -> str:
        """For messages."""
        asked = f", {self.family}" if self.schedule == ADAPTIVE else ""
        return f"{self.schedule}{asked}, {self.load}"

    def client_flags(self, seed: int, dataset: Path) -> list[str]:
        """Of ``vllm bench serve``; no sampling parameter, because the built-in refuses them.

        Args:
            seed: of random tokens and of arrival times.
            dataset: where ``write_questions`` wrote.
        """
        shape = self.shape
        flags: dict[str, object] = {"--num-prompts": self.num_requests, "--seed": seed}
        flags |= {"--num-warmups": NUM_WARMUPS}
        if self.rate:
            flags |= {"--request-rate": self.rate}
        else:
            flags |= {"--max-concurrency": self.concurrency}
        if self.sent:
            flags |= {"--extra-body": self.sent}
        if self.schedule == ADAPTIVE:
            flags |= {"--backend": "openai-chat", "--endpoint": "/v1/chat/completions"}
            flags |= {"--dataset-name": "sharegpt", "--dataset-path": dataset}
            flags |= {"--sharegpt-output-len": ANSWER_TOKENS}
            switches = ["--disable-shuffle"]
        else:
            flags |= {"--backend": "openai", "--endpoint": "/v1/completions"}
            flags |= {"--dataset-name": "random", "--random-input-len": shape.input_len}
            flags |= {"--random-output-len": shape.output_len}
            switches = ["--ignore-eos"]
        return [*(str(part) for flag in flags.items() for part in flag), *switches]


def draw_questions(
    count: int, seed: int, families: Sequence[str] = tuple(FAMILIES)
) -> list[Question]:
    """``count`` held-out questions, family after family in turn, so that any prefix is mixed."""
    each, num = math.ceil(count / len(families)), len(families)
    drawn = questions(families, "heldout", each, seed)
    return [drawn[index % num * each + index // num] for index in range(count)]


def write_questions(asked: Sequence[Question], path: Path) -> None:
    """The file of ``vllm bench serve --dataset-name sharegpt``; its ``custom`` needs pandas."""
    turns = [({"value": one.prompt}, {"value": one.answer}) for one in asked]
    path.write_text(json.dumps([{"conversations": pair} for pair in turns]))


def num_correct(asked: Sequence[Question], texts: Sequence[str]) -> int:
    """How many answers are right."""
    return sum(one.is_correct(text) for one, text in zip(asked, texts, strict=True))


# --- what is expected of answers -----------------------------------------------------------------


def card_accuracy(model: Path) -> float | None:
    """The least share of right answers to expect, by the checkpoint's model card.

    The lower end of the 95% interval of what transformers scored: the card's questions are a
    sample, too. The mean over the families, because workloads hold as many questions of each. None
    where there is no card with held-out scores.
    """
    card = model / "README.md"
    _, found, table = (card.read_text() if card.exists() else "").partition("## Held-out answers")
    if not found:
        return None
    lines = [line for line in table.split("\n## ")[0].splitlines() if line.startswith("| ")]
    lines = [line for line in lines if not line.startswith("| all ")]  # their sum
    columns = [cell.strip() for cell in lines[0].strip("|").split("|")]
    column = next((i for i, name in enumerate(columns) if "transformers" in name), 1)
    cells = [line.strip("|").split("|")[column] for line in lines[1:]]
    shares = [float(match[1]) / 100 for cell in cells if (match := re.search(r"([\d.]+) %", cell))]
    asked = re.search(r"Of (\d+) questions", table)
    if not shares or asked is None:
        return None
    count = int(asked[1])
    low, _ = wilson_interval(round(count * sum(shares) / len(shares)), count)
    return low


def accuracy_problem(
    correct: int, asked: int, expected: float | None, source: str = "by the model card at least"
) -> str:
    """What is wrong with this many right answers; empty if nothing is.

    One-sided: better than expected is no mistake. Questions count as independent. Where nobody
    knows what to expect, one right answer is enough.
    """
    if expected is None:
        return f"none of {asked} answers is right" if asked and not correct else ""
    if binomial_tail(correct, asked, expected) >= WRONG_BELOW:
        return ""
    return (
        f"{correct} of {asked} answers are right; {source} {100 * expected:.1f} %, and "
        f"chance alone gives so few with a probability below {WRONG_BELOW:g}"
    )


def binomial_tail(successes: int, trials: int, share: float) -> float:
    """P(X <= successes) for a binomial X, ``0 < share < 1``."""
    share = min(max(share, 1e-9), 1 - 1e-9)
    log_p, log_q = math.log(share), math.log1p(-share)
    log_all = math.lgamma(trials + 1)
    terms = (
        log_all
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * log_p
        + (trials - k) * log_q
        for k in range(successes + 1)
    )
    return min(1.0, math.fsum(map(math.exp, terms)))
