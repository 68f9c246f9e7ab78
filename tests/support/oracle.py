"""A draft model that is a function, and its process: ``python -m tests.support.oracle ADDRESS``.

The process imports no vLLM, so it starts in a fraction of a second.
"""

import random
import sys
import time
from collections.abc import Sequence

from dllm.remote.address import parse
from dllm.remote.stream import Server
from dllm.remote.worker import DraftWorker

VOCAB = 97


def truth(tokens: Sequence[int]) -> int:
    """The token that a target writes behind these."""
    return (sum(tokens[-3:]) * 31 + len(tokens)) % VOCAB


def plain(prompt: list[int], num_tokens: int) -> list[int]:
    """What the target writes."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(truth(tokens))
    return tokens


class Oracle:
    """Drafts of a worker that knows the target, and is wrong now and then (``worker.Drafts``)."""

    vocab_size = VOCAB

    def __init__(self, alpha: float = 1.0, max_len: int = 4096) -> None:
        self.max_len = max_len
        self.alpha, self.random = alpha, random.Random(0)
        self.runs: dict[str, tuple[list[int], int]] = {}
        self._number = 0

    def start(self, tokens: list[int], count: int) -> str:
        assert tokens and count > 0 and len(tokens) + count <= self.max_len
        assert all(0 <= token < VOCAB for token in tokens)
        self._number += 1
        self.runs[str(self._number)] = list(tokens), count
        return str(self._number)

    def stop(self, run: str) -> None:
        del self.runs[run]

    def step(self) -> list[tuple[str, list[int], bool]]:
        found = []
        for run, (tokens, left) in list(self.runs.items()):
            token = truth(tokens)
            if self.random.random() >= self.alpha:
                token = (token + 1) % VOCAB
            self.runs[run] = tokens + [token], left - 1
            found.append((run, [token], left == 1))
            if left == 1:
                del self.runs[run]
        return found


def main(address: str) -> None:
    """Draft until the process is killed; prints the address, and when it was ready."""
    server = Server(parse(address, None, "address", is_own=True))
    print(server.address, time.monotonic(), flush=True)
    DraftWorker(Oracle()).serve(server, lambda: True)


if __name__ == "__main__":
    main(sys.argv[1])
