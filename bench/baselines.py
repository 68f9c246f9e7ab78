"""Who is measured: ours, vLLM's built-in DiffusionGemma, tiny-ar, and Hugging Face's ``generate``.

Ours and the built-in differ in one environment variable; both are unmodified ``vllm serve`` on the
same CPU runtime with the same flags. tiny-ar is the autoregressive twin of tiny-dllm: of the same
size, trained on the same questions, served without speculation and greedily (an autoregressive
model of this size answers worse when sampled). ``generate`` answers at batch 1 in this process'
fork, eager, as transformers does without being told otherwise.
"""

import json
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import (
    AUTOREGRESSIVE,
    BUILTIN,
    IN_CANVAS_PASSES,
    NO_CANVAS,
    OURS,
    OVERLAPPED,
    REFERENCE,
)
from bench.race import Contestant
from bench.servers import Server, ServerOptions
from bench.workloads import FIXED, Shape, card_accuracy
from dllm.tools.eval_server import counter

BUILTIN_WIDE = "built-in, 32 rows"
PROBED_AT_ONCE = 33  # requests; more than the built-in takes by default


@dataclass(frozen=True)
class Baselines:
    """What is served, of a command line.

    Attributes:
        model, autoregressive: checkpoints; the second may be None.
        steps: per block, on the fixed schedule.
        flags: of all servers.
        names: the contestants that are wanted.
    """

    model: Path
    autoregressive: Path | None
    steps: int
    flags: tuple[str, ...]
    names: tuple[str, ...]

    def contestants(self, schedule: str, folder: Path) -> list[Contestant]:
        """Contestants of a schedule, their servers not started."""
        generation = folder / "generation"
        write_generation_config(self.model, generation, self.steps if schedule == FIXED else None)
        flags = ("--generation-config", str(generation), *self.flags)
        disabled = (("DLLM_DISABLE", "1"),)
        expected = card_accuracy(self.model)

        def served(name: str, commits: int, *more: str) -> Contestant:
            environment = () if name == OURS else disabled
            options = ServerOptions(name, str(self.model), (*flags, *more), environment)
            server = Server(options, folder / f"{name.replace(' ', '_')}.log")
            return Contestant(
                name, self.model, commits, server, takes_seeds=name == OURS, expected=expected
            )

        found = [
            served(OURS, OVERLAPPED),
            served(BUILTIN, IN_CANVAS_PASSES),
            served(BUILTIN_WIDE, IN_CANVAS_PASSES, "--max-num-seqs", "32"),
            Contestant(
                REFERENCE, self.model, IN_CANVAS_PASSES, generation=generation, expected=expected
            ),
        ]
        if self.autoregressive and schedule != FIXED:
            path = self.autoregressive
            options = ServerOptions(AUTOREGRESSIVE, str(path), self.flags)
            server = Server(options, folder / f"{AUTOREGRESSIVE}.log")
            greedy = ("--temperature", "0")
            found.append(
                Contestant(
                    AUTOREGRESSIVE,
                    path,
                    NO_CANVAS,
                    server,
                    client_flags=greedy,
                    expected=card_accuracy(path),
                )
            )
        return [one for one in found if one.name in self.names]


def write_generation_config(model: Path, folder: Path, steps: int | None) -> None:
    """The checkpoint's generation_config.json, with ``steps`` denoise steps a block if given.

    A file, because the built-in does not read ``--override-generation-config``.
    """
    generation = json.loads((model / "generation_config.json").read_text())
    if steps is not None:
        generation |= {"max_denoising_steps": steps, "confidence_threshold": 0.0}
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps(generation))


# --- what a server takes -------------------------------------------------------------------------


def facts(contestant: Contestant, shape: Shape) -> dict[str, object]:
    """What a server does with a temperature, a seed, and more requests than it takes at once."""
    server = contestant.server
    assert server is not None
    prompt = [20 + position % 100 for position in range(shape.input_len)]
    tried: dict[str, dict[str, float]] = {"temperature": {"temperature": 0.5}, "seed": {"seed": 1}}
    statuses: dict[str, object] = {
        f"http_status_with_{name}": server.complete(prompt=prompt, max_tokens=1, **body).status
        for name, body in tried.items()
    }
    running = most_running(server, prompt, shape.output_len)
    return statuses | {f"running_of_{PROBED_AT_ONCE}_requests": running}


def most_running(server: Server, prompt: Sequence[int], num_tokens: int) -> int:
    """The largest number of requests that ran at once, of ``PROBED_AT_ONCE`` sent together."""
    body = {"prompt": list(prompt), "max_tokens": num_tokens, "ignore_eos": True}
    senders = [threading.Thread(target=server.complete, kwargs=body) for _ in range(PROBED_AT_ONCE)]
    for sender in senders:
        sender.start()
    most = 0
    while any(sender.is_alive() for sender in senders):
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
            metrics = response.read().decode()
        most = max(most, int(counter(metrics, "vllm:num_requests_running")))
    return most
