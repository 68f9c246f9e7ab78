"""``dllm eval --decisions``: typed questions to a server, and how far its answers can be trusted.

A file has a JSON object on each line::

    {"input": "Ann has 34, Bob has 51.",
     "question": {"type": "predicate", "instructions": "Ann has more"},
     "answer": false}

``input`` and ``question`` are as in the body of ``/v1/decisions``. ``answer`` is true or false, the
value of a choice, or the label of a level. A predicate may have ``odds`` instead, the true
probability of yes; ``name`` groups lines in the table.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from dllm.prompts.files import json_lines
from dllm.settings.command import OK, CommandError, new_file, positive
from dllm.tools import client
from dllm.tools.calibration import Decided, cross_validated, report, table
from dllm.tools.client import Connection, explained

TYPES = ("predicate", "choice", "score")


def main(argv: Sequence[str]) -> int:
    given = parse(argv)
    lines = read_lines(given.decisions)
    connection = client.connect(given.base_url, given.model, given.api_key)
    found = scores(lines, ask(connection, lines, given.concurrency, given.samples))
    title = f"{connection.model} at {connection.url}: typed decisions"
    Console().print(table(found["reports"], title))
    Console().print(advice(found["temperatures"]), soft_wrap=True)
    if given.output:
        result = {"model": connection.model, "samples": given.samples, **found}
        given.output.write_text(json.dumps(result, indent=2) + "\n")
    return OK


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dllm eval",
        description="Ask a server typed questions, and measure how far its answers can be trusted.",
    )
    client.add_arguments(parser)
    parser.add_argument(
        "--decisions",
        type=Path,
        required=True,
        metavar="FILE",
        help="a line of JSON for each question, with input, question and answer",
    )
    parser.add_argument("--samples", type=positive, help="canvases of a question")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests at once (8)")
    parser.add_argument("--output", type=new_file, metavar="FILE", help="write all numbers as JSON")
    return parser.parse_args(argv)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Raises CommandError if the file cannot be read, or a line is not as the module says."""
    try:
        lines = json_lines(path)
    except ValueError as error:
        raise CommandError(f"--decisions {error}") from None
    for where, line in lines:
        try:
            values = _values(line["question"])
            has_odds = line["question"]["type"] == "predicate" and 0 <= line.get("odds", -1) <= 1
            if (not has_odds or "answer" in line) and line.get("answer") not in values:
                raise ValueError(f"answer {line.get('answer')!r} is none of {values}")
        except (ValueError, TypeError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise CommandError(f"--decisions {where}: {problem}") from None
    if not lines:
        raise CommandError(f"--decisions {path}: no line has a question.")
    return [line for _, line in lines]


def _values(question: dict[str, Any]) -> list[Any]:
    """The values that an answer may have, in the order of the probabilities."""
    if question["type"] == "predicate":
        return [True, False]
    if question["type"] == "choice":
        return [one["value"] for one in question["choices"]]
    return [one["label"] for one in question["levels"]]


def ask(
    connection: Connection,
    lines: Sequence[dict[str, Any]],
    concurrency: int,
    samples: int | None = None,
) -> list[Decided]:
    """Every question twice. Raises CommandError: the server failed or refused a request."""
    extra = {} if samples is None else {"samples": samples}

    def once(line: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
        found: Any = connection.client.decisions.create(
            model=connection.model,
            input=line["input"],
            questions=[line["question"]],
            extra_body=extra,
        ).to_dict()
        answer, told = found["answers"][0], found["diagnostics"][0]
        if answer["type"] == "refusal":
            raise CommandError(
                f"the server refused {line['question']} for its label mass {told['label_mass']}; "
                "start it with least_mass 0 to measure."
            )
        if answer["type"] == "predicate":
            return [answer["probability"], 1 - answer["probability"]], told
        return [one["probability"] for one in answer["probabilities"]], told

    with ThreadPoolExecutor(concurrency) as pool, explained(connection.url):
        first = list(pool.map(once, lines))
        second = list(pool.map(once, lines))
    return [
        Decided(
            type=line["question"]["type"],
            probs=probs,
            right=_values(line["question"]).index(line["answer"]) if "answer" in line else None,
            label_mass=told["label_mass"],
            hesitation=told["hesitation"],
            odds=line.get("odds"),
            again=again,
        )
        for line, (probs, told), (again, _) in zip(lines, first, second, strict=True)
    ]


def scores(lines: Sequence[dict[str, Any]], decided: Sequence[Decided]) -> dict[str, Any]:
    by_name: dict[str, list[Decided]] = {}
    for line, one in zip(lines, decided, strict=True):
        by_name.setdefault(str(line.get("name", one.type)), []).append(one)
    of_type = {
        kind: [one for one in decided if one.type == kind and one.right is not None]
        for kind in TYPES
    }
    fitted = {kind: cross_validated(found) for kind, found in of_type.items()}
    return {
        "reports": {name: report(found) for name, found in by_name.items()}
        | ({"all": report(decided)} if len(by_name) > 1 else {}),
        "temperatures": {kind: found for kind, found in fitted.items() if found is not None},
    }


def advice(temperatures: dict[str, dict[str, float]]) -> str:
    texts = [
        f"{kind}: temperature {found['temperature']:.2f}; on questions that it was not fitted on, "
        f"log loss {found['log_loss']:.3f} -> {found['log_loss_after']:.3f}, "
        f"ECE {found['ece']:.3f} -> {found['ece_after']:.3f}"
        for kind, found in temperatures.items()
    ]
    better = {
        kind: found["temperature"]
        for kind, found in temperatures.items()
        if found["log_loss_after"] < found["log_loss"]
    }
    if better:
        option = json.dumps({"dllm": {"decisions": {"temperature": better}}})
        texts.append(f"--additional-config '{option}'")
    return "\n".join(texts)
