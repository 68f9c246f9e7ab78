"""What it costs to stream unfinished canvases: a step's parts, and neighbours of a watched stream.

    python -m bench.watching [--rounds 20] [--requests 24] [--model DIR] [--results DIR]

Parts are timed in this process, in microseconds: what a denoise step pays for the possibility while
nobody watches, and what it pays for one watcher (a canvas of 256 positions, on a CPU).

For neighbours a server answers the same requests twice in each round: beside a stream with canvases
and beside one without, each of the two first in every other round. The ratio is that of the two
times; it is given with a 95% interval of its median over the rounds (bootstrap).
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import timeit
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from bench.context import RESULTS, Rows, provenance, reporting_failures, write_csv
from bench.servers import SERVE_FLAGS, Server, ServerOptions
from bench.tables import markdown, section
from dllm.api.events import CanvasWriter, Stream
from dllm.api.watching import CanvasFeed, Pace, Watch, Watchers, has_frames
from dllm.engine import frame_taker
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.frame_taker import FrameTaker
from dllm.engine.frames import FrameMail

CANVAS, REQUESTS, REPEATS = 256, 8, 2000
NEIGHBOURS = 4
WATCHED: dict[str, Any] = {"vllm_xargs": {"diffusion_stream": "canvas"}}


@reporting_failures
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="of neighbours; 0: parts alone")
    parser.add_argument("--requests", type=int, default=24, help="of the neighbours, in each run")
    parser.add_argument("--model", default="checkpoints/tiny-dllm")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    given = parser.parse_args(argv)
    rows: list[dict[str, object]] = [
        {"what": name, "value": round(value, 2), "unit": unit}
        for name, (value, unit) in parts().items()
    ]
    if given.rounds:
        rows += neighbours(given.model, given.rounds, given.requests)
    for row in rows:
        print(f"{row['what']:50} {row['value']:>10} {row['unit']}")
    shared = provenance("bench.watching")
    write_csv(given.results / "watching.csv", [row | shared for row in rows])
    return 0


# --- parts of a step ------------------------------------------------------------------------------


class Tokenizer:
    """Names tokens by their ids; real texts are remembered, so that they cost no more."""

    def decode(self, ids: Sequence[int]) -> str:
        return f"t{ids[0]}"


def parts() -> dict[str, tuple[float, str]]:
    """Each part with its unit; times are the least of five runs."""
    taker, batch = FrameTaker(REQUESTS), _batch()
    silent = _outputs()
    watched_params = SamplingParams(extra_args={"diffusion_stream": "canvas"})

    def nobody() -> None:
        taker.are_wanted(batch)
        FrameMail(SimpleNamespace(), {}).add_to({})  # type: ignore[arg-type]
        has_frames(silent)

    found = {"nobody watches: worker, core and API server": _us(nobody)}
    with mock.patch.object(frame_taker, "get_tp_group"):  # there is no group; a mock is true
        taker.add_request(3, watched_params)
    rows, step, canvas = CanvasRows.of_batch(batch, CANVAS), _step(), _ids()
    steps_before = torch.zeros(REQUESTS + 1, dtype=torch.int32)

    def worker() -> Any:
        answer = SimpleNamespace()
        if taker.are_wanted(batch):
            taker.take(rows, step, canvas, steps_before, batch)
        taker.attach(answer)  # type: ignore[arg-type]
        return answer

    answer = worker()
    request = {"r3": SimpleNamespace(num_prompt_tokens=0, client_index=0)}

    def core() -> EngineCoreOutputs:
        outputs = {0: _outputs()}
        FrameMail(answer, request).add_to(outputs)
        return outputs[0]

    states = {"r3": SimpleNamespace(external_req_id="r", request_index=0)}
    watchers = Watchers(SimpleNamespace(request_states=states), limit=1)
    feed = CanvasFeed(Pace(10**9))
    watchers.start("r", Watch(feed, 1))
    writer = CanvasWriter(Stream("id", "model", True, frozenset({1}), Tokenizer()))
    message = msgspec.msgpack.encode(core())
    decode = msgspec.msgpack.Decoder(EngineCoreOutputs).decode

    def server() -> list[str]:
        watchers.deliver(decode(message))
        return [writer.frame(*one) for one in feed.take()]

    (line,) = server()
    return found | {
        "one watcher: worker": _us(worker),
        "one watcher: engine core": _us(core),
        "one watcher: API server": _us(server),
        "one watcher: an event": (float(len(line)), "bytes"),
    }


def _us(run: Callable[[], Any]) -> tuple[float, str]:
    return min(timeit.repeat(run, number=REPEATS, repeat=5)) / REPEATS * 1e6, "us"


def _batch() -> Any:
    return SimpleNamespace(
        num_reqs=REQUESTS,
        req_ids=[f"r{i}" for i in range(REQUESTS)],
        idx_mapping_np=np.arange(REQUESTS),
        idx_mapping=torch.arange(REQUESTS),
        cu_num_logits_np=np.arange(REQUESTS + 1) * CANVAS,
        seq_lens=torch.full((REQUESTS,), 300),
        expanded_local_pos=torch.arange(REQUESTS * CANVAS) % CANVAS,
    )


def _ids() -> torch.Tensor:
    return torch.randint(0, 262_144, (REQUESTS, CANVAS))


def _step() -> Any:
    return SimpleNamespace(
        argmax_canvas=_ids(),
        accepted=torch.rand(REQUESTS, CANVAS) < 0.5,
        converged=torch.zeros(REQUESTS, dtype=torch.bool),
        stats=SimpleNamespace(entropy=torch.rand(REQUESTS * CANVAS)),
    )


def _outputs() -> EngineCoreOutputs:
    tokens = [EngineCoreOutput(request_id="other", new_token_ids=[1])]
    return EngineCoreOutputs(outputs=tokens)


# --- neighbours -----------------------------------------------------------------------------------


def neighbours(model: str, rounds: int, num_requests: int) -> list[dict[str, object]]:
    """Times of requests beside a stream with canvases, over those beside one without."""
    options = ServerOptions("watched", model, SERVE_FLAGS)
    with tempfile.TemporaryDirectory() as folder, Server(options, Path(folder) / "log") as server:
        server.start()
        server.wait_until_ready()
        for extra in ({}, WATCHED):
            _run(server, num_requests, extra)  # warm
        ratios, frames = [], 0
        for number in range(rounds):
            pair = [(False, {}), (True, WATCHED)]
            times = {}
            for is_watched, extra in pair if number % 2 else reversed(pair):
                times[is_watched], seen = _run(server, num_requests, extra)
                frames += seen
            ratios.append(times[True] / times[False])
    low, high = _interval(ratios)
    return [
        {"what": name, "value": round(value, 4), "unit": unit}
        for name, value, unit in (
            ("neighbours: time beside a watched stream", statistics.median(ratios), "ratio"),
            ("neighbours: 95% of that, low", low, "ratio"),
            ("neighbours: 95% of that, high", high, "ratio"),
            ("neighbours: rounds", rounds, "count"),
            ("neighbours: frames that were sent", frames, "count"),
        )
    ]


def _run(server: Server, num_requests: int, extra: dict[str, Any]) -> tuple[float, int]:
    """Seconds that the neighbours took beside an endless stream, and how many frames it had."""
    with _stream(server, extra) as frames, ThreadPoolExecutor(NEIGHBOURS) as pool:
        start = time.perf_counter()
        done = pool.map(
            lambda seed: (
                server.complete(
                    prompt="Thank Ann for the map, from Bob.",
                    max_tokens=64,
                    seed=seed,
                    ignore_eos=True,
                ).status
            ),
            range(num_requests),
        )
        if bad := set(done) - {200}:
            raise RuntimeError(f"neighbours got HTTP {sorted(bad)} (0: no answer) instead of 200")
        return time.perf_counter() - start, len(frames)


@contextmanager
def _stream(server: Server, extra: dict[str, Any]) -> Iterator[list[None]]:
    """One client that streams answer after answer; the list grows with the frames that it reads.

    Raises:
        OSError: the server refused the stream, or is gone.
    """
    body = {
        "model": server.options.model,
        "prompt": "Thank Ann for the map, from Bob.",
        "max_tokens": 256,
        "ignore_eos": True,
        "stream": True,
        "seed": 0,
    } | extra
    frames: list[None] = []
    is_over, begun = threading.Event(), threading.Event()

    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )

    def read() -> None:
        try:
            while not is_over.is_set():
                with urllib.request.urlopen(request) as lines:
                    for line in lines:
                        begun.set()
                        if b'"canvas"' in line:
                            frames.append(None)
                        if is_over.is_set():
                            break
        finally:
            begun.set()  # or nobody would see what went wrong

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        begun.wait()
        try:
            yield frames
        finally:
            is_over.set()
            reader.result()


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95% of the medians of resampled ratios."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


# --- table ---------------------------------------------------------------------------------------


def watching(results: Path) -> str:
    """Section of docs/streaming.md: what watching costs."""
    return section(results / "watching.csv", "python -m bench.watching", _table)


def _table(rows: Rows) -> str:
    lines = [[row["what"], f"{row['value']} {row['unit']}"] for row in rows]
    return markdown((["", ""], lines))


if __name__ == "__main__":
    sys.exit(main())
