"""What a run asks for.

Two schedules, each with the prompts that it makes sense for:

    adaptive    held-out questions of the task suite (``bench/toys/suite.py``), as many of each
                family, as chat messages. Answers end where the model ends them, and blocks stop
                when they converge. Or prompts of a file, for a model that does not know the suite.
    fixed       random tokens, answered with exactly as many tokens as asked for. Every block takes
                the same number of denoise steps, so this measures what a pass costs.

Questions are new in every round, those of another workload are others, and all contestants of a
round get the same.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from bench.toys.prompts import write_lines
from bench.toys.suite import FAMILIES, Question, questions

ADAPTIVE, FIXED = "adaptive", "fixed"
ANSWER_TOKENS = 128  # at most, of an answer to a question; right ones are shorter
NUM_WARMUPS = 2

# Answers to `report` take two canvases of the bundled model. The built-in reads generated blocks in
# another way than the reference, gets a third of them wrong, and would have no speed at all.
ONE_BLOCK = tuple(family for family in FAMILIES if family != "report")
MIXED = "mixed"


@dataclass(frozen=True)
class Shape:
    """Sizes that all workloads of a command share, in tokens; the last two are of random prompts.

    Raises ValueError: ``output_len`` is not a multiple of ``canvas_length``.
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
        return [20 + position % 100 for position in range(self.input_len)]


@dataclass(frozen=True)
class Workload:
    schedule: str
    num_requests: int
    shape: Shape
    concurrency: int | None = None  # requests in flight; each answer is followed by the next one
    rate: float | None = None  # instead, requests a second, at random (Poisson)
    steps_per_block: int | None = None  # what every block must take; None leaves it to the model
    families: tuple[str, ...] = ONE_BLOCK  # of the questions
    prompts: Path | None = None  # instead of questions, a file from which a round draws its prompts

    @property
    def family(self) -> str:
        return self.families[0] if len(self.families) == 1 else MIXED

    @property
    def name(self) -> str:
        load = f"{self.rate:g} per s" if self.rate else f"{self.concurrency} at once"
        return f"{self.schedule}{f', {self.family}' * (self.schedule != FIXED)}, {load}"

    def asked(self, seed: int) -> tuple[Question, ...]:
        """The questions of a round; none for random tokens, and for prompts of a file."""
        if self.schedule == FIXED or self.prompts is not None:
            return ()
        return draw_questions(self.num_requests, seed, self.families)

    def client_flags(self, seed: int, dataset: Path) -> list[str]:
        """Flags of ``vllm bench serve``; no sampling parameter, because the built-in refuses them.

        ``seed``: of what is drawn, and of arrival times. ``dataset``: is written if there are
        questions; its name ends in .jsonl.
        """
        shape = self.shape
        flags: dict[str, object] = {"--num-prompts": self.num_requests, "--seed": seed}
        flags |= {"--num-warmups": NUM_WARMUPS}
        if self.rate:
            flags |= {"--request-rate": self.rate}
        else:
            flags |= {"--max-concurrency": self.concurrency}
        if self.schedule != FIXED:
            if self.prompts is None:
                write_lines(dataset, [{"prompt": one.prompt} for one in self.asked(seed)])
            flags |= {"--backend": "openai-chat", "--endpoint": "/v1/chat/completions"}
            flags |= {"--dataset-name": "custom", "--dataset-path": self.prompts or dataset}
            flags |= {"--custom-output-len": ANSWER_TOKENS}
            switches = ["--skip-chat-template", *["--disable-shuffle"] * (self.prompts is None)]
        else:
            flags |= {"--backend": "openai", "--endpoint": "/v1/completions"}
            flags |= {"--dataset-name": "random", "--random-input-len": shape.input_len}
            flags |= {"--random-output-len": shape.output_len}
            switches = ["--ignore-eos"]
        return [*(str(part) for flag in flags.items() for part in flag), *switches]


@functools.cache
def draw_questions(
    count: int, seed: int, families: tuple[str, ...] = tuple(FAMILIES)
) -> tuple[Question, ...]:
    each, num = math.ceil(count / len(families)), len(families)
    drawn = questions(families, "heldout", each, seed)
    return tuple(drawn[index % num * each + index // num] for index in range(count))
