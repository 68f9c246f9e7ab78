"""Connects to an OpenAI-compatible server; errors say what the user can do."""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dllm.settings.checks import did_you_mean
from dllm.settings.command import CommandError

if TYPE_CHECKING:
    import openai

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0
KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Connection:
    """A server that has answered, and the name of the model to request from it."""

    url: str  # without /v1
    model: str
    client: "openai.OpenAI"
    loaded_from: str | None = None  # folder or repository, where the server says it (vLLM does)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-url", default=DEFAULT_URL, help="of the server, with or without /v1 (%(default)s)"
    )
    parser.add_argument("--model", help="served model name (the only one, if there is one)")
    add_key(parser)


def add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key", metavar="KEY", help=f"of the server ({KEY}, if it is set)")


def without_key(argv: Sequence[str], key: str | None) -> list[str]:
    """A command line as it may be written down: without the key, or a password in a URL."""
    shown = [each.replace(key, f"${KEY}") if key else each for each in argv]
    return [re.sub(r"://[^/@]+@", "://", each) for each in shown]


def connect(base_url: str, model: str | None, api_key: str | None = None) -> Connection:
    """None: the server's only model, and OPENAI_API_KEY, which a server without a key ignores.

    Raises CommandError: no server answers, it refuses the key, it does not serve this model, or it
    serves several and none was named.
    """
    import openai  # takes a second, which --help of a command need not take

    url = base_url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--base-url {base_url}: allowed: a URL such as {DEFAULT_URL}.")
    key = api_key or os.environ.get(KEY) or "none"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=TIMEOUT_S)
    with explained(url):
        found = client.with_options(max_retries=0).models.list()
        served = {one.id: getattr(one, "root", None) for one in found}
    if model is None and len(served) == 1:
        (model,) = served
    if model not in served:
        problem = "several models, name one with --model"
        if model is not None:
            problem = f"no model {model!r}{did_you_mean(model, [*served])}"
        raise CommandError(f"{url} serves {problem}; served: {', '.join(served)}.")
    return Connection(url, model, client, served[model])


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Raises CommandError with a sentence for whatever the OpenAI client raises inside."""
    import openai

    try:
        yield
    except openai.APITimeoutError:
        raise CommandError(f"the server at {url} did not answer in {TIMEOUT_S:.0f} s.") from None
    except openai.APIConnectionError as error:
        reason = error.__cause__ or error
        raise CommandError(
            f"no server answers at {url} ({reason}). Start one (in a checkout: `make serve`), "
            "or give its address with --base-url."
        ) from None
    except openai.AuthenticationError:
        raise CommandError(
            f"the server at {url} wants another key (HTTP 401): the one that it was started with. "
            f"Give it with --api-key, or in the variable {KEY}."
        ) from None
    except openai.APIStatusError as error:
        raise CommandError(
            f"the server at {url} refused with HTTP {error.status_code}: {error.message}"
        ) from None
    except openai.APIError as error:
        raise CommandError(f"the server at {url} failed: {error.message}") from None
