"""How many questions a server answers exactly.

    python -m bench.toys.evaluate --base-url http://127.0.0.1:8000

Typed decisions are scored by ``dllm eval``. accuracy has its Wilson score interval at 95%; tokens,
of a question, include the end-of-sequence token; steps are those of a block, "-" where the model
has none or does not report them.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from bench.context import command_line, progress, reporting_failures
from bench.tables import markdown
from bench.toys.served import Run, ServedModel
from bench.toys.suite import GROUPS, SPLITS, STYLES, Question, questions
from dllm.settings.checks import did_you_mean
from dllm.settings.command import OK, CommandError, new_file, positive
from dllm.tools import client

ALL = "all"
Z_95 = 1.959963984540054  # of the standard normal distribution: 2.5% lie above it
Answered = tuple[Sequence[Question], Run]
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
