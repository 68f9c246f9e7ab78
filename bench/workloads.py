"""What a run asks for, and whether it was answered rightly.

Questions are held-out ones of the task suite (``dllm/tasks/suite.py``), as many of each family,
sent as chat messages, so that the server's chat template applies; answers end where the model ends
them. Random tokens are sent as they are and must be answered with exactly as many tokens as asked
for. A workload's prompts are new in every round, those of another workload are others, and all
contestants of a round get the same.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dllm.tasks.suite import FAMILIES, Question, questions

QUESTIONS, RANDOM = "questions", "random"
ADAPTIVE, FIXED = "adaptive", "fixed"
ANSWER_TOKENS = 128  # of an answer; right ones are shorter
NUM_WARMUPS = 2

# So few right answers must be at least this probable, if the model answers as its card says.
WRONG_BELOW = 1e-4


@dataclass(frozen=True)
class Shape:
    """Sizes that all workloads of a command share, tokens."""

    canvas_length: int
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        if self.output_len % self.canvas_length:
            raise ValueError(
                f"--output-len {self.output_len} must be a multiple of the canvas length "
                f"{self.canvas_length}: a block that is cut costs as much as a whole one."
            )


@dataclass(frozen=True)
class Workload:
    """One run.

    Attributes:
        schedule: ADAPTIVE (blocks stop when they converge) or FIXED.
        prompts: QUESTIONS or RANDOM.
        concurrency: requests in flight; each answer is followed by the next request.
        rate: instead, requests per second, arriving at random (Poisson) whatever is in flight.
        steps_per_block: what every block must take; None leaves it to the model.
        sent: JSON merged into every request (``--extra-body``), for arguments of ours.
    """

    schedule: str
    prompts: str
    num_requests: int
    shape: Shape
    concurrency: int | None = None
    rate: float | None = None
    steps_per_block: int | None = None
    sent: str = ""

    @property
    def load(self) -> str:
        """``8 at once`` or ``4 per s``."""
        return f"{self.rate:g} per s" if self.rate else f"{self.concurrency} at once"

    @property
    def name(self) -> str:
        """As it appears in tables."""
        return f"{self.schedule}, {self.prompts}, {self.load}"

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
        if self.prompts == QUESTIONS:
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


# Those whose answers fit one canvas of the bundled model. The built-in reads generated blocks in
# another way than the reference, gets a third of `report` wrong, and would have no speed at all.
ONE_BLOCK = tuple(family for family in FAMILIES if family != "report")


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
    """Mean over the families of what transformers scored, by the checkpoint's model card.

    None where there is no card with held-out scores. Workloads hold as many questions of each
    family, so that this is the share of right answers to expect.
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
    return sum(shares) / len(shares) if shares else None


def accuracy_problem(
    correct: int, asked: int, expected: float | None, source: str = "the model card says"
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
