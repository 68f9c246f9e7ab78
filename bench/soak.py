"""A long run of everything at once against one server, and what it leaves behind.

    python -m bench.soak [--minutes 12] [--model tiny-dllm tiny-sdar ...] [--results DIR]

For each model (84 minutes for all of them) three phases (docs/soak.md), of a quarter, a quarter and
a half of the time. What is sent: ``bench/soak_load.py``, and ``/health`` ten times a second. Writes
``soak.csv``: ``what`` was counted or measured, of which ``model`` and ``part`` (a phase or a
process), and its ``value``. ``MEASURE: slope`` is per hour, with its 95% interval: least squares
through the medians of twenty stretches of equal length. Exit code 1 if a good request failed, a
status was 500 or above, tokens differed, or the log has a traceback or an output not finite.
"""

import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from random import Random
from typing import NamedTuple

import aiohttp
import numpy as np
import psutil  # type: ignore[import-untyped]

from bench.context import ROOT, Row, Rows, command_line, progress, publish, reporting_failures
from bench.servers import Server
from bench.soak_load import HEAVY, MODELS, RUDE, Answer, Hostile, Kinds, Request, ask, good
from bench.tables import Section, grouped, markdown

CALM, RUDELY, EVERYTHING = PHASES = ("calm", "rude", "everything")
SHARES = {CALM: 0.25, RUDELY: 0.25, EVERYTHING: 0.5}
CLIENTS, RUDE_CLIENTS, HEAVY_CLIENTS = 4, 4, 1
RUDE_PAUSE_S, HEAVY_PAUSE_S = 0.2, 2.0
WARM_UP = 60  # requests before anything counts
TIMEOUT_S = 300
SAMPLE_S, PING_S = 2.0, 0.1
SHADOWED = 10  # every so many good requests one is sent again
STRETCHES = 20
STUDENT = 2.101  # 97.5% of Student's t with STRETCHES - 2 degrees of freedom
# Weights can be replaced in development mode alone; there vLLM logs a traceback of each refusal.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
KINDS = set[str]().union(*(kinds for kinds, _ in MODELS.values()))  # of good requests
SILENCE = "longest silence of /health"
MEASURES = {"memory": "MiB", "file descriptors": "", "threads": "", "sockets": ""}
PROCESSES = {"EngineCore": "engine core", "Worker": "worker", "vllm": "API server"}  # by title
REPLAYED, DIFFERENT = ("sent once more", ""), ("other tokens", "")
BROKEN, TRACEBACKS = ("not finite", "log"), ("tracebacks", "log")
WRONG = ("failed", DIFFERENT[0], BROKEN[0], TRACEBACKS[0])  # rows whose value has to be 0


class Sample(NamedTuple):
    """What a process held at a time of ``time.monotonic``: the ``MEASURES``."""

    seconds: float
    process: str
    held: tuple[float, ...]


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=12, help="of load, for each model")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    for name in given.model:
        campaign = campaign_of(name, 60 * given.minutes)
        rows += [{"model": name} | row for row in campaign.rows()]
        publish(given.results / SECTION.file, rows)
        for problem, count in Counter(campaign.problems).most_common(20):
            print(f"{name}: {count} x {problem}", file=sys.stderr)
    print(SECTION(given.results))
    return int(any(row["value"] for row in rows if row["what"] in WRONG))


def campaign_of(name: str, seconds: float) -> "Campaign":
    """The campaign against a server of one model, when it is over."""
    kinds, flags = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="dllm-soak-") as folder:
        log = Path(folder) / "log"
        with Server(name, str(ROOT / "checkpoints" / name), log, flags, ENVIRONMENT) as server:
            server.wait_until_ready()
            campaign = Campaign(server.model, kinds, seed=0)
            asyncio.run(campaign.run(server.url, server.process.pid, seconds))
            campaign.read_log(log.read_text(errors="replace"))  # not that of its end
    return campaign


class Campaign:
    def __init__(self, model: str, kinds: Kinds, seed: int) -> None:
        self.model, self.kinds, self.dice = model, kinds, Random(seed)
        self.phase, self.deadline = CALM, 0.0
        self.latencies: dict[str, list[float]] = defaultdict(list)  # of good requests, s, by phase
        self.silence: dict[str, float] = defaultdict(float)  # of /health, s, by phase
        # By what is counted and its part: of requests a phase and a kind.
        self.counts = Counter(dict.fromkeys([REPLAYED, DIFFERENT, BROKEN, TRACEBACKS], 0))
        self.problems: list[str] = []
        self.shadows: list[tuple[Request, Answer]] = []  # good requests that are sent again
        self.samples: list[Sample] = []

    async def run(self, url: str, pid: int, seconds: float) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # the server: 5 s
        patience = aiohttp.ClientTimeout(TIMEOUT_S)
        async with aiohttp.ClientSession(url, connector=connector, timeout=patience) as self._http:
            for _ in range(WARM_UP // CLIENTS):  # grammars are compiled, caches filled
                requests = [good(self.dice, self.kinds) for _ in range(CLIENTS)]
                await asyncio.gather(*(ask(self._http, self.model, one) for one in requests))
            for self.phase in PHASES:
                progress(f"  {self.phase}")
                self.deadline = time.monotonic() + SHARES[self.phase] * seconds
                await self._run_phase(pid)
            self.counts[REPLAYED] = len(self.shadows)
            progress(f"  {len(self.shadows)} requests once more, alone")
            for request, before in self.shadows:
                after = await ask(self._http, self.model, request)
                if after != before:
                    self.counts[DIFFERENT] += 1
                    answers = f"{before.choices} became {after.choices}"
                    self.problems.append(f"{request.kind}: {answers}: {request.body}"[:1000])

    async def _run_phase(self, pid: int) -> None:
        """All clients of a phase until it is over; each has dice of its own."""
        hostile: list[tuple[dict[str, Hostile], float]] = []
        if self.phase != CALM:
            hostile += [(RUDE, RUDE_PAUSE_S)] * RUDE_CLIENTS
        if self.phase == EVERYTHING:
            hostile += [(HEAVY, HEAVY_PAUSE_S)] * HEAVY_CLIENTS
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(self._good_client(Random(self.dice.random())))
            clients.create_task(self._ping())
            for kinds, pause_s in hostile:
                dice = Random(self.dice.random())
                clients.create_task(self._hostile(dice, kinds, pause_s))
            if self.phase == EVERYTHING:
                clients.create_task(self._watch(pid))

    async def _good_client(self, dice: Random) -> None:
        while time.monotonic() < self.deadline:
            request = good(dice, self.kinds)
            start = time.perf_counter()
            answer = await ask(self._http, self.model, request)
            self.answered(request, answer, time.perf_counter() - start)
            if answer.status == 0:
                await asyncio.sleep(1)  # the server may be gone

    async def _hostile(self, dice: Random, kinds: dict[str, Hostile], pause_s: float) -> None:
        """One hostile act after the other, with a pause of ``pause_s`` on average."""
        for kind in cycle(dice.sample(list(kinds), len(kinds))):
            if time.monotonic() >= self.deadline:
                break
            try:
                statuses = await kinds[kind](self._http, self.model, dice)
            except (aiohttp.ClientError, OSError, TimeoutError):
                statuses = []  # the server may hang up on such clients
            self.got(kind, statuses)
            await asyncio.sleep(dice.expovariate(1 / pause_s))

    async def _ping(self) -> None:
        while time.monotonic() < self.deadline:
            start = time.perf_counter()
            with suppress(aiohttp.ClientError, TimeoutError):
                await (await self._http.get("/health")).read()
            self.silence[self.phase] = max(self.silence[self.phase], time.perf_counter() - start)
            await asyncio.sleep(PING_S)

    async def _watch(self, pid: int) -> None:
        while time.monotonic() < self.deadline:
            with suppress(psutil.NoSuchProcess):
                self.samples += sample(pid)
            await asyncio.sleep(SAMPLE_S)

    def answered(self, request: Request, answer: Answer, seconds: float) -> None:
        """Count a good request; every tenth of those that were answered has a shadow."""
        part = f"{self.phase}: {request.kind}"
        self.counts["requests", part] += 1
        if not answer.is_good:
            self.counts["failed", part] += 1
            self.problems.append(f"{request.kind}: HTTP {answer.status} {answer.problem}")
            return
        self.latencies[self.phase].append(seconds)
        if sum(map(len, self.latencies.values())) % SHADOWED == 0:
            self.shadows.append((request, answer))

    def got(self, kind: str, statuses: Sequence[int]) -> None:
        """Count hostile requests; statuses of 500 and above are failures of the server."""
        part, bad = f"{self.phase}: {kind}", [status for status in statuses if status >= 500]
        self.counts["requests", part] += max(1, len(statuses))
        self.counts["failed", part] += len(bad)
        self.problems += [f"{kind}: HTTP {status}" for status in bad]

    def read_log(self, text: str) -> None:
        """Count outputs that are not finite, and tracebacks; the last line of each is a problem."""
        self.counts[BROKEN] += text.count("the model's output is not finite")
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if "Traceback (most recent call last)" in line:
                self.counts[TRACEBACKS] += 1
                last = (one for one in lines[number:] if re.search(r"\w+(Error|Exception)\b", one))
                self.problems.append(f"log: {next(last, line)}"[:300])

    def rows(self) -> list[Row]:
        rows = [_row(*counted, value) for counted, value in self.counts.items()]
        for phase, seconds in self.latencies.items():
            for percent in (50, 99):
                value = 1e3 * float(np.percentile(seconds, percent))
                rows.append(_row(f"p{percent}", phase, value, unit="ms"))
        for phase, longest in self.silence.items():
            rows.append(_row(SILENCE, phase, 1e3 * longest, unit="ms"))
        for process in dict.fromkeys(one.process for one in self.samples):
            rows += self._held(process)
        return rows

    def _held(self, process: str) -> list[Row]:
        mine = [one for one in self.samples if one.process == process]
        rows = []
        for index, (measure, unit) in enumerate(MEASURES.items()):
            values = [one.held[index] for one in mine]
            rows.append(_row(measure, process, statistics.median(values), unit=unit))
            if found := slope([one.seconds for one in mine], values):
                an_hour = f"{unit} an hour".strip()
                rows.append(_row(f"{measure}: slope", process, *found, unit=an_hour))
        return rows


def sample(pid: int) -> list[Sample]:
    """What a server's processes hold; those that compile grammars come and go, and are left out."""
    now, found = time.monotonic(), []
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess), process.oneshot():
            title = "".join(process.cmdline()[:2])
            name = next((name for said, name in PROCESSES.items() if said in title), "")
            if not name or (name == "API server" and process.pid != pid):
                continue
            memory, sockets = process.memory_info().rss / 2**20, process.net_connections("all")
            held = memory, process.num_fds(), process.num_threads(), len(sockets)
            found.append(Sample(now, name, held))
    return found


def _row(what: str, part: str, value: float, *interval: float, unit: str = "") -> Row:
    low, high = interval or (None, None)
    return {"what": what, "part": part, "value": value, "unit": unit, "low": low, "high": high}


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float, float] | None:
    """Per hour, with its 95% interval; of ``times`` in seconds. None: too few samples a stretch."""
    if len(times) < 2 * STRETCHES:
        return None
    hours = [statistics.mean(part) / 3600 for part in np.array_split(times, STRETCHES)]
    medians = [statistics.median(part) for part in np.array_split(values, STRETCHES)]
    (value, _), covariance = np.polyfit(hours, medians, 1, cov=True)
    error = STUDENT * covariance[0, 0] ** 0.5
    return float(value), float(value - error), float(value + error)


def tables(rows: Rows) -> str:
    """Requests, latencies and replays of each model; what each of its processes holds."""
    lines, held = [], []
    for (model,), of_model in grouped(rows, "model").items():
        found = {(row["what"], row["part"]): row for row in of_model}
        lines.append([model, *_requests(found)])
        for process in (part for what, part in found if what == "memory"):
            cells = [f"{model}, {process}"]
            for measure in MEASURES:
                value = _number(found.get((measure, process)), 1 if measure == "memory" else 0)
                cells.append(f"{value}; {_number(found.get((f'{measure}: slope', process)), 1)}")
            held.append(cells)
    phases = " / ".join(PHASES)
    columns = [f"good requests: {phases}", "other requests", "p50, ms", "p99, ms"]
    columns += ["/health at most, ms", "failed", "sent once more", "other tokens", "tracebacks"]
    return f"{markdown(['', *columns], lines)}\n\n{markdown([EVERYTHING, *MEASURES], held)}"


def _requests(found: dict[tuple[str, str], dict[str, str]]) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for (what, part), row in found.items():
        if what in ("requests", "failed"):
            phase, kind = part.split(": ")
            group = "failed" if what == "failed" else "good" if kind in KINDS else "other"
            counts[group, phase] += int(float(row["value"]))
    cells = [" / ".join(f"{counts[one, phase]:,}" for phase in PHASES) for one in ("good", "other")]
    for what in ("p50", "p99", SILENCE):
        numbers = [_number(found.get((what, phase)), 0).removesuffix(" ms") for phase in PHASES]
        cells.append(" / ".join(numbers))
    cells.append(str(sum(counts["failed", phase] for phase in PHASES)))
    return [*cells, *(found[one]["value"] for one in (REPLAYED, DIFFERENT, TRACEBACKS))]


def _number(row: dict[str, str] | None, decimals: int) -> str:
    """``value unit [low .. high]``, or a dash."""
    if row is None:
        return "-"
    value, low, high = (
        f"{float(row[name]):.{decimals}f}" if row[name] else "" for name in ("value", "low", "high")
    )
    unit = f" {row['unit']}" if row["unit"] else ""
    return f"{value}{unit} [{low} .. {high}]" if low else f"{value}{unit}"


SECTION = Section("soak.csv", "python -m bench.soak", tables)  # of docs/soak.md


if __name__ == "__main__":
    sys.exit(main())
