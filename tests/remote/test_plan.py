"""The planner against simulations that draw every token, against known values, and its command."""

import heapq
import http.server
import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from dllm.cli import main
from dllm.remote.plan import EXAMPLE, Drafts, Grid, Targets, plan, read_plan
from dllm.settings.command import FAILED, OK

ALPHAS = (0.9, 0.7, 0.8, 0.5, 0.6)  # given the drafts before
SURVIVAL = tuple(np.cumprod(ALPHAS))


def flat(ms: float, most: int = 512) -> Grid:
    """The same time for any batch and width."""
    return Grid((1.0, float(most)), ((ms, ms), (ms, ms)), (0.0, 64.0))


def pools(requests: int = 1, engines: int = 1, workers: int = 1) -> tuple[Targets, Drafts]:
    return (
        Targets(engines, requests, flat(15.0), price=8.0),
        Drafts(workers, flat(2.0), SURVIVAL, price=1.0),
    )


def draw_kept(rng: np.random.Generator, shape: tuple[int, ...], width: int) -> np.ndarray:
    """How many of ``width`` drafts are kept, drawn draft by draft."""
    kept = np.zeros(shape, dtype=int)
    alive = np.ones(shape, dtype=bool)
    for place in range(width):
        alive &= rng.random(shape) < ALPHAS[place]
        kept += alive
    return kept


@pytest.mark.parametrize("width", [1, 3, 5])
def test_tokens_and_time_are_those_of_a_simulation_that_draws_every_token(width):
    """Of 200,000 steps; the mean's standard error is below 0.2 %, so 1 % is five of them."""
    targets, drafts = pools(requests=4)
    row = plan(targets, drafts, 0.5)[width]
    kept = draw_kept(np.random.default_rng(width), (200_000, 4), width)
    tokens = (1 + kept).sum()
    ms = 200_000 * (15.0 + 0.5 + 2.0 * width)
    assert row.tokens_per_s == pytest.approx(1e3 * tokens / ms, rel=0.01)
    assert row.speedup == pytest.approx(row.tokens_per_s / (4 * 1e3 / 15.0))


def simulate(
    num_targets: int, away: float, num_steps: int, step_ms: float, per_row: float
) -> float:
    """Milliseconds of a cycle: a heap of events, where `plan` goes from engine step to step."""
    number = itertools.count()
    events = [(away * t / num_targets, next(number), "ask") for t in range(num_targets)]
    heapq.heapify(events)
    waiting: list[int] = []
    running: list[int] = []
    is_busy, answers, first_at, now = False, 0, 0.0, 0.0
    while answers < 450 * num_targets:
        now, _, kind = heapq.heappop(events)
        if kind == "ask":
            waiting.append(num_steps)
        else:
            left = [steps - 1 for steps in running]
            done = left.count(0)
            running = [steps for steps in left if steps]
            for _ in range(done):
                answers += 1
                heapq.heappush(events, (now + away, next(number), "ask"))
                if answers == 50 * num_targets:
                    first_at = now
            is_busy = False
        simultaneous = events and events[0][0] <= now
        if not is_busy and not simultaneous and (waiting or running):
            running, waiting, is_busy = running + waiting, [], True
            took = step_ms + per_row * len(running)
            heapq.heappush(events, (now + took, next(number), "step"))
    return (now - first_at) / 400


@pytest.mark.parametrize("num_targets", [1, 2, 5])
@pytest.mark.parametrize(("step_ms", "per_row"), [(2.0, 0.0), (1.0, 0.5), (0.1, 3.0)])
def test_a_worker_of_several_targets_is_a_simulation_event_by_event(num_targets, step_ms, per_row):
    times = Grid((1.0, 64.0), (step_ms + per_row, step_ms + 64 * per_row))
    targets, drafts = pools(engines=num_targets)
    row = plan(targets, replace(drafts, step=times), 0.5)[4]
    expected = simulate(num_targets, 15.5, 4, step_ms, per_row)
    assert row.step_ms == pytest.approx(expected, rel=0.01)
    assert 0 < row.drafts_busy <= 1


def test_a_worker_that_is_too_slow_is_the_bottleneck():
    """A step that takes 3 ms for each request: ten targets get what one worker can give."""
    slow = Grid((1.0, 64.0), (3.0, 192.0))
    targets, drafts = pools(engines=10)
    rows = plan(targets, replace(drafts, step=slow), 0.5)
    assert rows[4].drafts_busy == pytest.approx(1.0)
    assert rows[4].step_ms == pytest.approx(10 * 4 * 3.0, rel=0.01)
    assert rows[4].bottleneck == "drafts" and rows[0].bottleneck == "target"
    assert plan(targets, replace(drafts, step=flat(0.1)), 0.1)[4].bottleneck == "target"
    assert plan(targets, drafts, 200.0)[1].bottleneck == "network"


def test_a_block_takes_one_step_whatever_its_width():
    targets, drafts = pools()
    rows = plan(targets, replace(drafts, is_block=True), 0.5)
    assert {row.step_ms for row in rows[1:]} == {17.5} and rows[0].step_ms == 15.0


def test_price():
    targets, drafts = pools(requests=4, engines=2, workers=3)
    plain, drafted = plan(targets, drafts, 0.5)[::3]
    assert plain.price == pytest.approx(16.0 / (plain.tokens_per_s * 3600) * 1e6)
    assert drafted.price == pytest.approx(19.0 / (drafted.tokens_per_s * 3600) * 1e6)


@pytest.mark.parametrize(("alpha", "best"), [(0.6, 3), (0.7, 4), (0.8, 5), (0.9, 8)])
def test_the_best_width_by_hand(alpha, best):
    """2 ms a draft, 15 ms a verification, 0.5 ms of network: the formula written out."""
    survival = tuple(alpha**place for place in range(1, 16))
    rows = plan(Targets(1, 1, flat(15.0)), Drafts(1, flat(2.0), survival), 0.5)
    by_hand = [(1 - alpha ** (k + 1)) / (1 - alpha) * 15 / (15.5 + 2 * k) for k in range(1, 16)]
    assert [row.speedup for row in rows[1:]] == pytest.approx(by_hand)
    assert max(rows, key=lambda row: row.speedup).width == best


def test_times_between_those_measured_are_interpolated_and_beyond_them_refused():
    grid = Grid((1.0, 8.0), ((10.0, 14.0), (17.0, 28.0)), (0.0, 4.0))
    assert grid.at(1, 2) == 12.0 and grid.at(4.5, 4) == 21.0 and grid.at(0.5, 0) == 10.0
    for requests, width in ((9, 0), (1, 5)):
        with pytest.raises(ValueError, match="no time was measured of"):
            grid.at(requests, width)


# --- the command ----------------------------------------------------------------------------------


def run(tmp_path: Path, text: str, *flags: str) -> int:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return main(["plan", str(path), *flags])


def test_the_example_is_a_plan(tmp_path, capsys):
    assert main(["plan", "--example"]) == OK
    assert capsys.readouterr().out == EXAMPLE
    assert run(tmp_path, EXAMPLE) == OK
    shown = capsys.readouterr().out
    given = read_plan(EXAMPLE)
    rows = plan(given.targets, given.drafts, given.round_trip_ms)
    best = max(rows, key=lambda row: row.tokens_per_s)
    assert f"Best: {best.width} drafts, {best.speedup:.2f}x." in shown
    assert re.search(rf"^\* +{best.width} ", shown, re.M)
    assert run(tmp_path, EXAMPLE.replace("1.2 ", "500.0 "), "--best", "price") == OK
    assert "Plain decoding is best" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[targets]", "[tragets]", "tragets"),
        ("round_trip_ms = 0.5", "", "round_trip_ms"),
        ("round_trip_ms = 0.5", "round_trip_ms = nan", "round_trip_ms"),
        ("engines = 1", "engins = 1", "engins"),
        ("engines = 1", "", "engines"),
        ("engines = 1", "engines = 0", "targets.engines"),
        ("workers = 1", "", "workers"),
        ("price = 8.0", "price = -1", "targets.price"),
        ("is_block = false", "is_block = 1", "drafts.is_block"),
        ("[0.80, 0.66,", "[0.80, 0.99,", "from 1 down to 0"),
        ("[0.80, 0.66,", "[1.80, 0.66,", "survival"),
        ("requests = [1, 8]\ndrafts", "requests = [8, 1]\ndrafts", "targets.step"),
        ("ms = [[14.0, 14.6], ", "ms = [", "targets.step"),
        ("drafts = [0, 8]", "drafts = [4, 8]", "step.drafts"),
        ("ms = [2.0, 2.2]", "ms = [2.0]", "drafts.step"),
        ("requests = 8 ", "requests = 9 ", "no time was measured of 9 requests"),
        ("[drafts]", "[drafts", "plan.toml"),
        ("engines = 1", "engines = 2", "no time was measured of 16 requests"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, capsys, old, new, said):
    assert old in EXAMPLE
    assert run(tmp_path, EXAMPLE.replace(old, new, 1)) == FAILED
    assert said in capsys.readouterr().err


@contextmanager
def serving(text: str) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def test_survival_comes_from_a_running_target(tmp_path, capsys):
    """Two engines' counts are added; a position that was never verified is left out."""
    accepted, verified = (
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        ("dllm:verified_tokens_per_pos_total"),
    )
    lines = [
        f'{name}{{engine="{engine}",model_name="m",position="{place}"}} {count}'
        for name, counts in ((accepted, (60.0, 10.0, 0.0)), (verified, (80.0, 40.0, 0.0)))
        for engine in (0, 1)
        for place, count in enumerate(counts)
    ]
    with serving("\n".join(lines)) as url:
        assert run(tmp_path, EXAMPLE, "--metrics", url) == OK
    shown = capsys.readouterr().out
    assert re.findall(r"^[* ] +\d+ +(\d\.\d\d)", shown, re.M) == ["1.00", "1.75", "2.00"]
    with serving("nothing 1.0") as url:
        assert run(tmp_path, EXAMPLE, "--metrics", url) == FAILED
    assert "has verified no drafts" in capsys.readouterr().err
    for url in ("file:///etc/passwd", "http://[::1/metrics", "http://127.0.0.1:abc/"):
        assert run(tmp_path, EXAMPLE, "--metrics", url) == FAILED
        assert f"--metrics {url}" in capsys.readouterr().err
