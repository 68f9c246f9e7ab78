"""The planner against a simulation that draws every draft, and by hand; and its command."""

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from dllm.cli import main
from dllm.remote.plan import gains
from dllm.settings.command import FAILED, OK

ALPHAS = (0.9, 0.7, 0.8, 0.5, 0.6)  # given the drafts before


@pytest.mark.parametrize("width", [1, 3, 5])
def test_tokens_and_gain_are_those_of_a_simulation_that_draws_every_draft(width):
    """Of 800,000 steps; the mean's standard error is below 0.2 %, so 1 % is five of them."""
    tokens, ms, gain = gains(np.cumprod(ALPHAS).tolist(), 15.0, 0.1, 2.0, 0.5)[width]
    drawn = np.random.default_rng(width).random((800_000, width)) < ALPHAS[:width]
    kept = 1 + drawn.cumprod(axis=1).sum(axis=1).mean()
    took = 15.0 + 0.5 + (2.0 + 0.1) * width
    assert (tokens, ms) == (pytest.approx(kept, rel=0.01), pytest.approx(took))
    assert gain == pytest.approx((kept / took) / (1 / 15.0), rel=0.01)


def test_a_block_takes_one_step_whatever_its_width():
    times = [ms for _, ms, _ in gains([0.8, 0.7, 0.6], 15.0, 0.0, 2.0, 0.5, is_block=True)]
    assert times == [15.0, 17.5, 17.5, 17.5]


@pytest.mark.parametrize(("alpha", "best"), [(0.6, 3), (0.7, 4), (0.8, 5), (0.9, 8)])
def test_the_best_width_by_hand(alpha, best, capsys):
    """2 ms a draft, 15 ms a verification, 0.5 ms of network: the formula written out."""
    by_hand = [(1 - alpha ** (k + 1)) / (1 - alpha) * 15 / (15.5 + 2 * k) for k in range(1, 16)]
    survival = [alpha**place for place in range(1, 16)]
    assert [gain for *_, gain in gains(survival, 15, 0, 2, 0.5)[1:]] == pytest.approx(by_hand)
    assert run("--alpha", str(alpha), "--drafts", "15") == OK
    assert re.search(rf"^\* +{best} ", capsys.readouterr().out, re.M)
    assert run("--survival", *map(str, survival)) == OK
    assert re.search(rf"^\* +{best} .* {by_hand[best - 1]:.2f}x$", capsys.readouterr().out, re.M)


# --- the command ----------------------------------------------------------------------------------


def run(*flags: str) -> int:
    return main(["plan", "--step-ms", "15", "--draft-ms", "2", *flags])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--alpha", "1.5"], "--alpha"),
        (["--alpha", "nan"], "--alpha"),
        (["--survival", "0.8", "-1"], "--survival"),
        (["--alpha", "0.8", "--round-trip-ms", "-1"], "--round-trip-ms"),
        (["--alpha", "0.8", "--step-ms", "0"], "--step-ms"),
        (["--alpha", "0.8", "--survival", "0.8"], "--survival"),
        ([], "--metrics"),
    ],
)
def test_what_is_no_number_is_named(flags, said, capsys):
    with pytest.raises(SystemExit):
        run(*flags)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "flags"),
    [("--survival", ["--survival", "0.6", "0.8"]), ("--drafts", ["--alpha", "1", "--drafts", "0"])],
)
def test_what_cannot_be_planned_is_refused(said, flags, capsys):
    assert run(*flags) == FAILED
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


def test_survival_comes_from_a_running_target(capsys):
    """Two engines' counts are added; a position that was never verified is left out."""
    accepted = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    verified = "dllm:verified_tokens_per_pos_total"
    lines = [
        f'{name}{{engine="{engine}",model_name="m",position="{place}"}} {count}'
        for name, counts in ((accepted, (60.0, 10.0, 0.0)), (verified, (80.0, 40.0, 0.0)))
        for engine in (0, 1)
        for place, count in enumerate(counts)
    ]
    with serving("\n".join(lines)) as url:
        assert run("--metrics", url) == OK
    shown = capsys.readouterr().out
    assert re.findall(r"^[* ] +\d+ +(\d\.\d\d)", shown, re.M) == ["1.00", "1.75", "2.00"]
    with serving("nothing 1.0") as url:
        assert run("--metrics", url) == FAILED
    assert "has verified no drafts" in capsys.readouterr().err
    for url in ("file:///etc/passwd", "http://[::1/metrics", "http://127.0.0.1:abc/"):
        assert run("--metrics", url) == FAILED
        assert f"--metrics {url}" in capsys.readouterr().err
