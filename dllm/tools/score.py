"""``dllm score``: how likely the model of a running server finds a given text behind a prompt.

It prints the server's answer as a line of JSON, for each text. See docs/rollouts.md.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dllm.settings.command import OK, CommandError
from dllm.tasks.prompts import json_lines
from dllm.tools import client

AT_ONCE = 16  # texts


def main(argv: Sequence[str]) -> int:
    """Score the texts and return the exit status.

    Raises:
        CommandError: the server does not answer or refuses, or the file cannot be read.
    """
    args = _parser().parse_args(argv)
    connection = client.connect(args.base_url, args.model, args.api_key)
    options = {"samples": args.samples, "seed": args.seed, "places": args.places}
    given = {name: value for name, value in options.items() if value is not None}

    def scored(body: dict[str, Any]) -> dict[str, Any]:
        if args.causal:
            return causal_score(connection, given | body)
        return post(connection, "/v1/scores", given | body)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for answer in pool.map(scored, _bodies(args)):
            print(json.dumps(answer), flush=True)
    return OK


def post(connection: client.Connection, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a body, sent with the model's name."""
    with client.explained(connection.url):
        absolute = f"{connection.url}{path}"  # /tokenize is not below /v1
        body = {"model": connection.model, **body}
        answer: dict[str, Any] = connection.client.post(absolute, cast_to=dict[str, Any], body=body)
    return answer


def causal_score(connection: client.Connection, body: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of a text's tokens, of a causal pass, and their sum.

    Raises:
        CommandError: the body asks for something else, or a part of it has no token.
    """
    if others := sorted(body.keys() - {"prompt", "text"}):
        raise CommandError(f"--causal does not know {', '.join(others)}. Leave it out.")
    ids = []
    for name in ("prompt", "text"):
        part = body[name]
        if isinstance(part, str):
            asked = {"prompt": part, "add_special_tokens": name == "prompt"}
            part = post(connection, "/tokenize", asked)["tokens"]
        if not isinstance(part, list) or not part:
            raise CommandError(f"{name} {part!r}: allowed are a text, or a list of token ids.")
        ids.append(part)
    asked = {"prompt": [*ids[0], *ids[1]], "max_tokens": 1, "prompt_logprobs": 0}
    (choice,) = post(connection, "/v1/completions", asked)["choices"]
    of_text = choice["prompt_logprobs"][len(ids[0]) :]
    found = [row[str(token)]["logprob"] for row, token in zip(of_text, ids[1], strict=True)]
    return {"model": connection.model, "token_logprobs": found, "logprob": sum(found)}


def _bodies(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.file is None:
        if args.prompt is None or args.text is None:
            raise CommandError("allowed: PROMPT and TEXT, or --file. Give one of these.")
        yield {"prompt": args.prompt, "text": args.text}
        return
    try:
        bodies = json_lines(args.file)
    except ValueError as error:
        raise CommandError(f"--file {error}") from None
    for where, body in bodies:
        if not isinstance(body, dict) or not {"prompt", "text"} <= body.keys():
            raise CommandError(
                f"--file {where}: no prompt or no text; allowed: objects with both, each a text or "
                "a list of token ids."
            )
    yield from (body for _, body in bodies)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dllm score", description="How likely a server's model finds given texts behind prompts."
    )
    parser.add_argument("prompt", nargs="?", help="as the model reads it: no template is applied")
    parser.add_argument("text", nargs="?")
    parser.add_argument(
        "--file", type=Path, help="lines of JSON, each a body of /v1/scores with prompt and text"
    )
    parser.add_argument("--samples", type=int, help="of the ELBO's estimate (8)")
    parser.add_argument("--seed", type=int, help="of the masks that are drawn (0)")
    parser.add_argument(
        "--places", type=int, nargs="+", help="score these tokens of the text alone, in one pass"
    )
    parser.add_argument(
        "--causal",
        action="store_true",
        help="by prompt_logprobs, where the model has a causal pass",
    )
    client.add_arguments(parser)
    return parser
