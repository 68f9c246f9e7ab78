"""A draft worker that knows the answers: what a small, right draft model would be to a target.

    python -m bench.known_drafts SOCKET TEXTS AHEAD [STEP_S]

``SOCKET`` is where it listens. ``TEXTS`` is a JSON file with the token ids of prompts and their
answers. A step of its "model" is a pause (seconds), whatever it drafts for; everything else is a
real draft worker.
"""

import json
import sys
import time
from pathlib import Path

from dllm.remote.address import Address
from dllm.remote.stream import Server
from dllm.remote.worker import DraftWorker, Limits

STEP_S = 5e-4


class KnownDrafts:
    """Drafts from a list of texts (``worker.Drafts``); nothing behind other tokens."""

    vocab_size, max_len = 2**31, 2**20

    def __init__(self, texts: list[list[int]], step_s: float = STEP_S) -> None:
        self._step_s = step_s
        self._texts = texts
        self._runs: dict[str, list[int]] = {}  # the tokens that a run has yet to write
        self._number = 0

    def start(self, tokens: list[int], count: int) -> str:
        """Begin to write what follows these tokens; zeros behind a text's end."""
        found = next((text for text in self._texts if text[: len(tokens)] == tokens), tokens)
        known = found[len(tokens) : len(tokens) + count]
        self._number += 1
        self._runs[str(self._number)] = known + [0] * (count - len(known))
        return str(self._number)

    def stop(self, run: str) -> None:
        """Give up a run."""
        del self._runs[run]

    def step(self) -> list[tuple[str, list[int], bool]]:
        """One token of each run."""
        time.sleep(self._step_s)
        found = [(run, [left.pop(0)], not left) for run, left in self._runs.items()]
        self._runs = {run: left for run, left in self._runs.items() if left}
        return found


def main(place: str, texts: str, ahead: str, step_s: str = str(STEP_S)) -> None:
    """Draft until the process is killed; prints the address as ``dllm draft-worker`` does."""
    server = Server(Address(place))
    print(f"dllm draft-worker: known drafts at {server.address}", flush=True)
    drafts = KnownDrafts(json.loads(Path(texts).read_text()), float(step_s))
    DraftWorker(drafts, Limits(int(ahead))).serve(server, lambda: True)


if __name__ == "__main__":
    main(*sys.argv[1:])
