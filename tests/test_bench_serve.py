"""bench/serve.py without servers: reading results, refusing wrong ones, ratios, CSV."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import serve
from bench.report import (
    BUILTIN,
    OURS,
    Context,
    GateError,
    Measurement,
    Spread,
    Workload,
    columns,
    measurement,
    pair_ratios,
    response_problems,
    run_problems,
    seed_problems,
    table,
    write_csv,
)
from bench.servers import Response, Server, ServerOptions, tail

# Two requests of two blocks of 32, eight denoise steps each.
WORKLOAD = Workload(num_prompts=2, input_len=16, output_len=64, canvas_length=32, steps_per_block=8)
MODEL = Path(__file__).parents[1] / "checkpoints/tiny-random"


def saved(passes_per_block: int = 8, **changes: Any) -> dict[str, Any]:
    """What ``vllm bench serve`` saves, as far as it is read."""
    return {
        "completed": 2,
        "failed": 0,
        "errors": ["", ""],
        "duration": 0.5,
        "output_throughput": 256.0,
        "output_lens": [64, 64],
        "ttfts": [0.1, 0.2],
        "latencies": [0.24, 0.26],
        "diffusion_canvas_positions": passes_per_block * WORKLOAD.num_blocks * 32,
    } | changes


def measured(server: str, pair: int = 0, position: int = 0, **changes: Any) -> Measurement:
    passes = 9 if server == BUILTIN else 8
    return measurement(
        server,
        saved(passes, **changes),
        WORKLOAD,
        pair=pair,
        position=position,
        first_request_s=1.0,
        idle_cpu_percent=0.5,
    )


def test_numbers_of_a_run() -> None:
    ours, builtin = measured(OURS), measured(BUILTIN)
    assert ours.tokens_per_s == 256.0
    assert ours.ttft_ms == pytest.approx(150.0)
    assert ours.latency_ms == pytest.approx(250.0)
    # 500 ms for 4 blocks of 8 denoise steps, 4 commit passes of the built-in, and 2 prefills.
    assert ours.ms_per_denoise_step == pytest.approx(500 / 32)
    assert builtin.ms_per_denoise_step == pytest.approx(500 / 32)
    assert ours.ms_per_forward_pass == pytest.approx(500 / 34)
    assert builtin.ms_per_forward_pass == pytest.approx(500 / 38)
    assert (ours.steps_per_block, ours.passes_per_block) == (8, 8)
    assert (builtin.steps_per_block, builtin.passes_per_block) == (8, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completed": 1, "failed": 1, "errors": ["", "boom"]}, r"1 of 2 requests .*boom"),
        ({"output_lens": [64, 63]}, r"\[63\] tokens instead of 64"),
        ({"diffusion_canvas_positions": 31 * 32}, "7.750 denoise steps per block instead of 8"),
    ],
)
def test_a_wrong_run_has_no_speed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GateError, match=message):
        measured(OURS, **changes)


def test_a_model_without_diffusion_counters_is_refused() -> None:
    result = saved()
    del result["diffusion_canvas_positions"]
    assert "no diffusion counters" in run_problems(OURS, result, WORKLOAD)[0]


def test_the_adaptive_schedule_leaves_the_steps_to_the_model() -> None:
    adaptive = replace(WORKLOAD, steps_per_block=None)
    assert run_problems(OURS, saved(diffusion_canvas_positions=31 * 32), adaptive) == []


def test_a_cut_block_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the canvas length 32"):
        Workload(num_prompts=1, input_len=1, output_len=40, canvas_length=32)


def test_response_problems() -> None:
    good, short = Response(200, (1, 2, 3)), Response(200, (1, 2))
    refused = Response(400, error="temperature")
    assert response_problems(OURS, [good, good], num_tokens=3) == []
    problems = response_problems(BUILTIN, [good, short, refused], num_tokens=3)
    assert problems == [
        "built-in: 2 tokens instead of 3",
        "built-in: HTTP 400 instead of 200: temperature",
    ]
    assert seed_problems(OURS, good, good) == []
    assert "agree in 2 tokens" in seed_problems(OURS, good, Response(200, (1, 9, 3)))[0]


class FakeServer(Server):
    """Answers without a process; ``sloppy`` ignores the seed."""

    def __init__(self, name: str, sloppy: bool = False) -> None:
        self.options = ServerOptions(name, "model", ())
        self.sloppy = sloppy
        self.bodies: list[dict[str, Any]] = []

    def complete(self, **body: Any) -> Response:
        self.bodies.append(body)
        first = len(self.bodies) if self.sloppy else 0
        return Response(200, (first,) * body["max_tokens"], seconds=0.25)


def test_the_gate_refuses_a_server_that_ignores_seeds() -> None:
    with pytest.raises(GateError, match="two equal requests with a seed"):
        serve.check(FakeServer(OURS, sloppy=True), WORKLOAD)
    assert serve.check(FakeServer(OURS), WORKLOAD) == 0.25


def test_the_builtin_is_not_sent_a_seed() -> None:
    builtin = FakeServer(BUILTIN, sloppy=True)
    serve.check(builtin, WORKLOAD)
    assert all("seed" not in body and "temperature" not in body for body in builtin.bodies)


def test_no_table_and_no_file_when_the_gate_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: serve.Options, schedule: str) -> list[Measurement]:
        raise GateError("ours: 3 tokens instead of 64")

    monkeypatch.setattr(serve, "measure", fail)
    assert serve.main(["--model", str(MODEL), "--results", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "ours: 3 tokens instead of 64" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_ratios_are_of_pairs() -> None:
    runs = [
        measured(OURS, pair=0, output_throughput=200.0),
        measured(BUILTIN, pair=0, output_throughput=100.0),
        measured(BUILTIN, pair=1, output_throughput=10.0),
        measured(OURS, pair=1, output_throughput=15.0),
    ]
    assert pair_ratios(runs, "tokens_per_s") == [2.0, 1.5]
    assert Spread.of([2.0, 1.5, 1.0]).text(1) == "1.5 [1.0 .. 2.0]"


def test_the_table_shows_both_sides_and_the_ratio() -> None:
    runs = [measured(OURS), measured(BUILTIN, output_throughput=128.0)]
    (line,) = [line for line in table("t", runs).splitlines() if line.startswith("output tokens/s")]
    assert "256.0 [256.0 .. 256.0]" in line
    assert line.endswith("2.000 [2.000 .. 2.000]")


def test_csv(tmp_path: Path) -> None:
    context = Context("eager", "fixed", "abc1234", "a cpu", "vllm 0", "a model", "python -m x")
    path = tmp_path / "results" / "serve_eager.csv"
    write_csv(path, [(context, measured(OURS)), (context, measured(BUILTIN, position=1))])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == columns()
    assert [row["server"] for row in rows] == [OURS, BUILTIN]
    assert rows[1]["position"] == "1"
    assert float(rows[0]["ms_per_denoise_step"]) == 15.625
    assert {"commit", "machine", "versions", "command", "mode", "schedule"} <= set(columns())


def test_the_servers_differ_in_one_environment_variable(tmp_path: Path) -> None:
    options = serve.parse(["--model", str(MODEL), "--eager"])
    ours, builtin = serve.server_options(options, tmp_path)
    assert ours.flags == builtin.flags
    assert "--enforce-eager" in ours.flags
    assert (ours.environment, builtin.environment) == ((), (("DLLM_DISABLE", "1"),))


def test_the_client_sends_no_sampling_parameter(tmp_path: Path) -> None:
    server = Server(ServerOptions(BUILTIN, "model", ()), tmp_path / "log")
    command = serve.client_command(server, WORKLOAD, 3, tmp_path, "r.json")
    assert command[1:3] == ["bench", "serve"]
    assert "--ignore-eos" in command
    assert command[command.index("--random-output-len") + 1] == "64"
    assert not {"--temperature", "--min-p", "--top-p", "--top-k"} & set(command)


def test_a_failure_is_shown_with_its_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cause = "(Worker pid=1) ERROR [x.py:1] RuntimeError: sizes differ"
    log.write_text("\n".join([cause, cause, *["at exit"] * 40, "RuntimeError: initialization"]))
    assert tail(log, num_lines=2).splitlines() == [
        "RuntimeError: sizes differ",
        "RuntimeError: initialization",
        "...",
        "at exit",
        "RuntimeError: initialization",
    ]
