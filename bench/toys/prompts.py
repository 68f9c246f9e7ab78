"""Writes questions into a file for the ``dllm`` commands, which do not know them.

    python -m bench.toys.prompts toys.jsonl --heldout 40 --train 1200
    python -m bench.toys.prompts toys.jsonl --heldout 200 --decisions

The first is of prompts, for ``dllm train drafter``, ``check-drafter`` and ``quantize``; the second
of typed decisions, for ``dllm eval``. Held-out questions come first, then those for training; so
many of each family, one family after the other.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.context import command_line, reporting_failures
from bench.toys.suite import DECISION_FAMILIES, FAMILIES, Question, questions
from dllm.settings.command import OK, new_file


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, writes=False)
    parser.add_argument("file", type=new_file, help="JSON lines")
    parser.add_argument("--heldout", type=int, default=0, metavar="N", help="of each family (0)")
    parser.add_argument("--train", type=int, default=0, metavar="N", help="of each family (0)")
    parser.add_argument("--decisions", action="store_true", help="typed decisions")
    parser.add_argument("--seed", type=int, default=0, help="of the questions (0)")
    given = parser.parse_args(arguments)
    kind = decision_line if given.decisions else prompt_line
    families = DECISION_FAMILIES if given.decisions else FAMILIES
    asked = [
        *questions(families, "heldout", given.heldout, given.seed),
        *questions(families, "train", given.train, given.seed),
    ]
    write_lines(given.file, [kind(one) for one in asked])
    return OK


def write_lines(file: Path, lines: Sequence[dict[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def prompt_line(asked: Question) -> dict[str, Any]:
    """A line of a file of prompts (``dllm/prompts/files.py``)."""
    return {"prompt": asked.prompt, "domain": asked.family}


def decision_line(asked: Question) -> dict[str, Any]:
    """A line of a file of typed decisions (``dllm/tools/decisions.py``)."""
    decision = asked.decision
    assert decision is not None
    line: dict[str, Any] = {"name": asked.family, "input": decision.input}
    line["question"] = decision.question
    if decision.odds is not None:
        line["odds"] = decision.odds
    else:
        line["answer"] = asked.answer if decision.options else asked.answer == "yes"
    return line


if __name__ == "__main__":
    sys.exit(main())
