"""How many questions a server, or a checkpoint in this process, answers exactly.

    python -m bench.toys.evaluate --base-url http://127.0.0.1:8000
    python -m bench.toys.evaluate --reference checkpoints/tiny-dllm

The second through Hugging Face transformers. Typed decisions are scored by ``dllm eval``.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.context import command_line, progress, reporting_failures
from bench.toys.report import Run, Score, score, table, total, wrong_answers
from bench.toys.served import ServedModel
from bench.toys.suite import GROUPS, SPLITS, STYLES, Question, questions
from dllm.settings.checks import did_you_mean
from dllm.settings.command import OK, CommandError, new_file, positive
from dllm.tools import client

ALL = "all"
KNOWN = [family for group in GROUPS.values() for family in group]


class Model(Protocol):
    @property
    def name(self) -> str: ...

    def answer(self, questions: Sequence[Question]) -> Run: ...


@reporting_failures
def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    asked = {family: _questions(family, given) for family in chosen_families(given.tasks)}
    model = open_model(given)
    scores, wrong = evaluate(model, asked)
    print(f"{model.name}: {given.split} questions, exact answers\n\n{table(scores)}")
    if given.output:
        settings = {key: value for key, value in sorted(vars(given).items()) if key != "api_key"}
        result = {
            "model": model.name,
            "settings": settings,
            "families": {one.name: one.to_mapping() for one in scores},
            "all": total(scores).to_mapping(),
            "wrong": wrong,
        }
        text = json.dumps(result, indent=2, ensure_ascii=False, default=str)  # paths
        given.output.write_text(f"{text}\n")
    return OK


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, writes=False)
    client.add_arguments(parser)
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="DIR",
        help="instead of a server: a checkpoint, through Hugging Face transformers in this process",
    )
    parser.add_argument(
        "--token-by-token",
        action="store_true",
        help="with --reference: a Nemotron as the autoregressive model that it is, too",
    )
    parser.add_argument(
        "--tasks",
        default=ALL,
        help="; ".join(f"{name}: {', '.join(group)}" for name, group in GROUPS.items())
        + "; or names (all)",
    )
    parser.add_argument("--num", type=positive, default=200, help="questions a family (200)")
    parser.add_argument("--split", choices=SPLITS, default="heldout", help="(heldout)")
    parser.add_argument("--style", choices=STYLES, help="of a right answer, as an adapter gives it")
    parser.add_argument("--question-seed", type=int, default=0, help="of the questions (0)")
    parser.add_argument("--seed", type=int, help="of request i is SEED + i; default: none is sent")
    parser.add_argument(
        "--temperature",
        type=float,
        help="default: what the model's generation config says; 0 suits autoregressive models",
    )
    parser.add_argument("--max-tokens", type=positive, default=128, help="of an answer (128)")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests at once (8)")
    parser.add_argument("--output", type=new_file, metavar="FILE", help="write all numbers as JSON")
    given = parser.parse_args(argv)
    if given.temperature is not None and not 0 <= given.temperature < float("inf"):
        parser.error(f"--temperature {given.temperature}; allowed: a number of at least 0.")
    if given.token_by_token and given.reference is None:
        parser.error("--token-by-token: a server answers as it was started; add --reference DIR.")
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


def open_model(given: argparse.Namespace) -> Model:
    """Raises CommandError if the server does not answer, or there is no such checkpoint."""
    if given.reference is None:
        connection = client.connect(given.base_url, given.model, given.api_key)
        return ServedModel(
            connection, given.max_tokens, given.concurrency, given.temperature, given.seed
        )
    from bench.toys.reference import open_reference  # imports torch: seconds

    return open_reference(
        given.reference, given.max_tokens, given.temperature, given.seed or 0, given.token_by_token
    )


def evaluate(
    model: Model, asked: dict[str, list[Question]]
) -> tuple[list[Score], list[dict[str, Any]]]:
    """One family after the other, because a server counts its steps for all requests together."""
    scores, wrong = [], []
    for family, drawn in asked.items():
        run = model.answer(drawn)
        scores.append(score(family, drawn, run))
        wrong += wrong_answers(drawn, run)
        progress(f"{family:<8} {100 * scores[-1].accuracy:5.1f}%")
    return scores, wrong


def _questions(family: str, given: argparse.Namespace) -> list[Question]:
    try:
        found = questions([family], given.split, given.num, given.question_seed)
    except ValueError as error:
        raise CommandError(f"--num {given.num}: {error}") from None
    return [one.in_style(given.style) for one in found]


if __name__ == "__main__":
    sys.exit(main())
