"""A long run of everything at once against one server, and what it leaves behind.

    python -m bench.soak [--minutes 10] [--model DIR] [--results DIR]

Three phases, with the same clients for good requests (``bench/soak_load.py``):

    calm        good requests alone                                        (a quarter of the time)
    rude        beside malformed, refused, aborted, unfinished and slow ones           (a quarter)
    everything  beside these, and bursts over the server's capacity                       (a half)

The last two differ because a burst is no abuse: it takes capacity as good requests do, and all wait
for their turn. A rude client must cost the others nothing.

Every tenth good request is sent once more when all is over, alone, and must get the same tokens.
Memory, file descriptors, threads and sockets of each process are sampled every two seconds.

Writes ``soak.csv`` (``bench/soak_report.py`` says what is in it). Exit code 1 if a good request
failed, a status was 500 or above, tokens differed, or the log has a traceback.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]

from bench.context import command_line, progress, provenance, reporting_failures, write_csv
from bench.servers import SERVE_FLAGS, Server, ServerOptions
from bench.soak_load import HEAVY, RUDE, TURNS, Answer, Hostile, Request, ask, good, turn
from bench.soak_report import CALM, EVERYTHING, RUDELY, Record, Sample, is_clean, report, soak

SHARES = {CALM: 0.25, RUDELY: 0.25, EVERYTHING: 0.5}
CLIENTS, RUDE_CLIENTS, HEAVY_CLIENTS = 4, 4, 1
RUDE_PAUSE_S, HEAVY_PAUSE_S = 0.2, 2.0
WARM_UP = 60  # requests before anything counts
TIMEOUT_S = 300
SAMPLE_S = 2.0
# Few places, so that a burst is over the capacity.
FLAGS = (*SERVE_FLAGS, "--max-num-seqs", "16", "--enable-prefix-caching")


@dataclass(frozen=True)
class Load:
    """What a client needs.

    Attributes:
        deadline: of ``time.monotonic``; nothing is sent after it.
    """

    session: aiohttp.ClientSession
    model: str
    record: Record
    dice: Random
    phase: str = CALM
    deadline: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the phase is."""
        return time.monotonic() >= self.deadline


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign, print the table, write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="of load, all phases together")
    parser.add_argument("--model", default="checkpoints/tiny-dllm")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    about = provenance("bench.soak")
    with tempfile.TemporaryDirectory(prefix="dllm-soak-") as folder:
        log = Path(folder) / "log"
        with Server(ServerOptions("soak", given.model, FLAGS), log) as server:
            server.start()
            server.wait_until_ready()
            record = asyncio.run(campaign(server, 60 * given.minutes, given.seed))
            record.read_log(log.read_text(errors="replace"))  # not that of its end
    rows = report(record, given.seed)
    write_csv(given.results / "soak.csv", [row | about for row in rows])
    print(soak(given.results))
    for problem, count in Counter(record.problems).most_common(20):
        print(f"{count} x {problem}", file=sys.stderr)
    return 0 if is_clean(rows) else 1


async def campaign(server: Server, seconds: float, seed: int) -> Record:
    """All phases, then the replays."""
    record = Record()
    async with aiohttp.ClientSession(
        server.url,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),  # the server: 5 s
        timeout=aiohttp.ClientTimeout(TIMEOUT_S),
    ) as session:
        load = Load(session, server.options.model, record, Random(seed))
        await warm_up(load)
        watching = asyncio.create_task(watch(server, record))
        for phase, share in SHARES.items():
            progress(f"  {phase}")
            record.begins[phase] = time.monotonic()
            end = record.begins[phase] + share * seconds
            await run_phase(replace(load, phase=phase, deadline=end))
        record.ended = time.monotonic()
        watching.cancel()
        with suppress(asyncio.CancelledError, psutil.NoSuchProcess):
            await watching
        progress(f"  {len(record.shadows)} requests once more, alone")
        await repeat(load)
    return record


async def warm_up(load: Load) -> None:
    """Requests of every kind, a few at once: grammars are compiled, caches filled."""
    for _ in range(WARM_UP // CLIENTS):
        requests = [good(load.dice) for _ in range(CLIENTS)]
        await asyncio.gather(*(ask(load.session, load.model, one) for one in requests))


async def run_phase(load: Load) -> None:
    """All clients of a phase until it is over; each has dice of its own."""
    hostile: list[tuple[dict[str, Hostile], float]] = []
    if load.phase != CALM:
        hostile += [(RUDE, RUDE_PAUSE_S)] * RUDE_CLIENTS
    if load.phase == EVERYTHING:
        hostile += [(HEAVY, HEAVY_PAUSE_S)] * HEAVY_CLIENTS

    def own() -> Load:
        return replace(load, dice=Random(load.dice.random()))

    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(good_client(own()))
        for kinds, pause_s in hostile:
            clients.create_task(hostile_client(own(), kinds, pause_s))


async def good_client(load: Load) -> None:
    """Single requests, and conversations that take as much of the time."""
    while not load.is_over:
        for _ in range(TURNS):
            await timed(load, good(load.dice))
        messages: list[dict[str, Any]] = []
        for _ in range(TURNS):
            request = turn(load.dice, messages)
            answer = await timed(load, request)
            if load.is_over or not answer.is_good:
                break
            text, *_ = answer.choices[0]
            messages = [*request.body["messages"], {"role": "assistant", "content": text}]


async def timed(load: Load, request: Request) -> Answer:
    """Ask, and record the answer."""
    start = time.perf_counter()
    answer = await ask(load.session, load.model, request)
    load.record.answered(load.phase, request, answer, time.perf_counter() - start)
    if answer.status == 0:
        await asyncio.sleep(1)  # the server may be gone
    return answer


async def hostile_client(load: Load, kinds: dict[str, Hostile], pause_s: float) -> None:
    """One hostile act after the other, with a pause of ``pause_s`` on average."""
    for kind in cycle(load.dice.sample(list(kinds), len(kinds))):
        if load.is_over:
            break
        try:
            statuses = await kinds[kind](load.session, load.model, load.dice)
        except (aiohttp.ClientError, OSError, TimeoutError):
            statuses = []  # the server may hang up on such clients
        load.record.got(load.phase, kind, statuses)
        await asyncio.sleep(load.dice.expovariate(1 / pause_s))


async def repeat(load: Load) -> None:
    """Send each shadow once more, alone; the request is recorded where the answers differ."""
    for request, before in load.record.shadows:
        after = await ask(load.session, load.model, request)
        if after != before:
            load.record.num_different += 1
            answers = f"{before.choices} became {after.choices}"
            load.record.problems.append(f"{request.kind}: {answers}: {request.body}"[:1000])


# --- what the server holds ------------------------------------------------------------------------

TITLES = {"EngineCore": "engine core", "Worker": "worker", "vllm": "API server"}


async def watch(server: Server, record: Record) -> None:
    """Sample the server's processes until this is cancelled, and once more then."""
    try:
        while True:
            record.samples += sample(server.pid)
            await asyncio.sleep(SAMPLE_S)
    finally:
        record.samples += sample(server.pid)


def sample(pid: int) -> list[Sample]:
    """What a server's processes hold; those that compile grammars come and go, and are left out."""
    now, found = time.monotonic(), []
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess), process.oneshot():
            title = "".join(process.cmdline()[:2])
            name = next((name for said, name in TITLES.items() if said in title), "")
            if name == "API server" and process.pid != pid:
                continue
            if name:
                held = (
                    process.memory_info().rss / 2**20,
                    process.num_fds(),
                    process.num_threads(),
                    len(process.net_connections("all")),
                )
                found.append(Sample(now, name, held))
    return found


if __name__ == "__main__":
    sys.exit(main())
