"""The planner against a simulation that draws every draft, and by hand; and its command."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from dllm.cli import main
from dllm.settings.command import FAILED, OK
from dllm.tools.plan import gains, kv_bytes_of
from tests.support.chat_stub import Stub, serve

ALPHAS = (0.9, 0.7, 0.8, 0.5, 0.6)  # given the drafts before


@pytest.mark.parametrize("width", [1, 3, 5])
def test_tokens_and_gain_are_those_of_a_simulation_that_draws_every_draft(width):
    """Of 800,000 steps; the mean's standard error is below 0.2 %, so 1 % is five of them."""
    drafting = [0.5 + 2.0 * each for each in range(1, 6)]
    tokens, ms, gain = gains(np.cumprod(ALPHAS).tolist(), 15.0, 0.1, drafting)[width]
    drawn = np.random.default_rng(width).random((800_000, width)) < ALPHAS[:width]
    kept = 1 + drawn.cumprod(axis=1).sum(axis=1).mean()
    took = 15.0 + 0.5 + (2.0 + 0.1) * width
    assert (tokens, ms) == (pytest.approx(kept, rel=0.01), pytest.approx(took))
    assert gain == pytest.approx((kept / took) / (1 / 15.0), rel=0.01)


# --- the command ----------------------------------------------------------------------------------


def run(*flags: str) -> int:
    return main(["plan", "--step-ms", "15", "--draft-ms", "2", *flags])


def shown(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of each row of the table."""
    rows = re.findall(r"^[* ] ( *\d+ .*)$", capsys.readouterr().out, re.M)
    return [row.split() for row in rows]


@pytest.mark.parametrize(("alpha", "best"), [(0.6, 3), (0.7, 4), (0.8, 5), (0.9, 8)])
def test_the_best_width_by_hand(alpha, best, capsys):
    """2 ms a draft, 15 ms a verification, 0.5 ms of network: the formula written out."""
    by_hand = [(1 - alpha ** (k + 1)) / (1 - alpha) * 15 / (15.5 + 2 * k) for k in range(1, 16)]
    for flags in (
        ["--alpha", str(alpha), "--drafts", "15"],
        ["--survival", *(str(alpha**place) for place in range(1, 16))],
    ):
        assert run(*flags) == OK
        marked = f"^\\* +{best} .* {by_hand[best - 1]:.2f}x "
        assert re.search(marked, capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("flags", "ms", "slots"),
    [
        ([], ["15.00", "17.50", "19.50"], ["0", "1", "2"]),
        (["--block"], ["15.00", "17.50", "17.50"], ["0", "1", "2"]),
        (["--source", "dflash"], ["15.00", "17.00", "17.00"], ["0", "3", "5"]),
        (["--source", "draft_model"], ["15.00", "17.00", "19.00"], ["0", "2", "4"]),
    ],
)
def test_what_drafts_decides_times_and_slots(flags, ms, slots, capsys):
    """A block is one pass; a drafter beside the target has slots of its own, a worker has none."""
    assert run("--alpha", "0.8", "--drafts", "2", *flags) == OK
    rows = shown(capsys)
    assert [row[2] for row in rows] == ms and [row[4] for row in rows] == slots


def test_pages_bytes_and_cost_by_hand(tmp_path, capsys):
    """256 requests with 5 drafts of a model of 80 layers of 8 key heads of 128, on 4 GPUs."""
    sizes = {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_key_value_heads": 8}))
    flags = ["--requests", "256", "--model", str(tmp_path), "--target-price", "12"]
    assert run("--alpha", "0.8", "--drafts", "5", *flags, "--draft-price", "5") == OK
    plain, *_, row = shown(capsys)
    # 256 * 5 slots of 327,680 bytes; a request's 5 are in one page, or in parts of two.
    assert row[4:7] == ["1280", "80-256", "419"]
    tokens = 256 * (1 - 0.8**6) / 0.2  # of a step of 25.5 ms
    assert float(row[7]) == pytest.approx(17 / (tokens / 25.5e-3 * 3600) * 1e6, abs=5e-4)
    assert float(plain[7]) == pytest.approx(12 / (256 / 15e-3 * 3600) * 1e6, abs=5e-4)


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ({}, 4 * 3 * 2 * 8),
        ({"layer_types": ["full_attention", "linear_attention", "sliding_attention"]}, 4 * 2 * 16),
        ({"head_dim": 4}, 4 * 3 * 2 * 4),
    ],
)
def test_the_layers_that_attend_keep_kv(more, size, tmp_path):
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    written = {"text_config": config | {"hidden_size": 32} | more}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert kv_bytes_of(tmp_path) == size


@contextmanager
def serving(text: str) -> Iterator[str]:
    """The address of a server's metrics, which are this text."""
    with serve(Stub(str, page=text)) as stub:
        yield f"{stub.url}/metrics"


ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
VERIFIED = "dllm:verified_tokens_per_pos_total"
TIMES = """vllm:inter_token_latency_seconds_sum{engine="0"} 2.0
vllm:inter_token_latency_seconds_count{engine="0"} 100
dllm:drafting_seconds_total{engine="0"} 0.35
dllm:draft_passes_total{engine="0"} 100
"""


def counted(name: str, counts: tuple[float, ...]) -> str:
    """Of two engines."""
    lines = (
        f'{name}{{engine="{engine}",model_name="m",position="{place}"}} {count}\n'
        for engine in (0, 1)
        for place, count in enumerate(counts)
    )
    return "".join(lines)


def test_survival_and_times_come_from_a_running_target(capsys):
    """Two engines' counts are added; a position that was never verified is left out."""
    counts = counted(ACCEPTED, (60.0, 10.0, 0.0)) + counted(VERIFIED, (80.0, 40.0, 0.0))
    with serving(counts + TIMES) as url:
        assert main(["plan", "--metrics", url]) == OK
        rows = shown(capsys)
        assert [row[1] for row in rows] == ["1.00", "1.75", "2.00"]
        # An output each 20 ms, of which 3.5 drafting: 0.5 on the way, and 2 for each of 1.5 drafts.
        assert [row[2] for row in rows] == ["16.50", "19.00", "21.00"]
        assert main(["plan", "--metrics", url, "--source", "dflash", "--step-ms", "10"]) == OK
        assert [row[2] for row in shown(capsys)] == ["10.00", "13.50", "13.50"]


def test_vllms_own_metrics_say_how_much_was_accepted(capsys):
    drafts = 'vllm:spec_decode_num_drafts_total{engine="0"} 160\n'
    with serving(counted(ACCEPTED, (60.0, 10.0)) + drafts) as url:
        assert run("--metrics", url) == OK
        assert [row[1] for row in shown(capsys)] == ["1.00", "1.75", "1.88"]
        assert main(["plan", "--metrics", url]) == FAILED
        assert "--step-ms" in capsys.readouterr().err


def test_an_asynchronous_server_does_not_say_how_long_drafts_take(capsys):
    counts = counted(ACCEPTED, (60.0, 10.0)) + counted(VERIFIED, (80.0, 40.0))
    times = "".join(line for line in TIMES.splitlines(True) if "drafting_seconds" not in line)
    with serving(counts + times) as url:
        assert main(["plan", "--metrics", url]) == FAILED
    assert "--draft-ms" in capsys.readouterr().err


def test_a_server_without_drafts_or_metrics_is_named(capsys):
    with serving("nothing 1.0\n") as url:
        assert run("--metrics", url) == FAILED
    assert "has verified no drafts" in capsys.readouterr().err
    for url in ("file:///etc/passwd", "http://[::1/metrics", "http://127.0.0.1:abc/"):
        assert run("--metrics", url) == FAILED
        assert f"--metrics {url}" in capsys.readouterr().err
