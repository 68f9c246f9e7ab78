"""What the serving benchmark makes of a run: numbers, refusals, ratios, tables. No servers."""

import io
import multiprocessing
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import race, serve
from bench.client import Client, command
from bench.context import GateError, Rows, as_text
from bench.measure import (
    BUILTIN_PASSES,
    COMMIT_APART,
    NO_CANVAS,
    OVERLAPPED,
    PROMPT_APART,
    SPEEDS,
    Measurement,
    csv_rows,
    measurement,
)
from bench.race import Contestant, Race, admit, undisturbed, withhold
from bench.serve import BUILTIN, OURS
from bench.servers import Response, Server, ServerOptions, tail
from bench.tables import Spread, load_tables, ratios
from bench.workloads import (
    ADAPTIVE,
    FIXED,
    Shape,
    Workload,
    accuracy_problem,
    binomial_tail,
    card_accuracy,
    draw_questions,
)
from dllm.tasks.suite import FAMILIES, Question
from dllm.tools.eval_report import wilson_interval

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "checkpoints/tiny-random"
SHAPE = Shape(canvas_length=32, input_len=16, output_len=64)
# Two requests of two blocks of 32, eight denoise steps each.
WORKLOAD = Workload(FIXED, 2, SHAPE, concurrency=1, steps_per_block=8)
COMMITS = {OURS: OVERLAPPED, BUILTIN: BUILTIN_PASSES}


def saved(passes_per_block: int = 8, **changes: Any) -> dict[str, Any]:
    """What ``vllm bench serve`` saves, as far as it is read: two requests of two blocks."""
    return {
        "completed": 2,
        "failed": 0,
        "errors": ["", ""],
        "duration": 0.5,
        "output_throughput": 256.0,
        "output_lens": [64, 64],
        "ttfts": [0.1, 0.2],
        "latencies": [0.24, 0.26],
        "generated_texts": ["", ""],
        "diffusion_canvas_positions": passes_per_block * 4 * 32,
    } | changes


def measured(name: str, pair: int = 0, **changes: Any) -> Measurement:
    passes = 9 if name == BUILTIN else 8
    return measurement(name, pair, COMMITS[name], saved(passes, **changes), WORKLOAD)


def rows_of(runs: list[Measurement]) -> Rows:
    return as_text(csv_rows([(WORKLOAD, one) for one in runs], {}))


# --- numbers -------------------------------------------------------------------------------------


def test_numbers_of_a_run() -> None:
    ours, builtin = measured(OURS), measured(BUILTIN)
    assert ours.tokens_per_s == 256.0
    assert ours.ttft_ms == pytest.approx(150.0)
    assert ours.latency_ms == pytest.approx(250.0)
    assert ours.latency_p99_ms == pytest.approx(259.8)
    # 500 ms for 4 blocks of 8 denoise steps.
    assert ours.ms_per_denoise_step == builtin.ms_per_denoise_step == pytest.approx(500 / 32)


# Of six blocks: a request warmed the server up.
COUNTED = {"commit_passes": 6.0, "diffusion_num_committed_tokens": 6.0 * 32}


@pytest.mark.parametrize(
    ("commits", "canvas_passes", "counted", "passes_per_block", "passes"),
    [
        (OVERLAPPED, 8, {}, 8, 32),
        (BUILTIN_PASSES, 9, {}, 9, 38),  # 4 commit passes and 2 of prompts
        (COMMIT_APART, 8, {}, 8.5, 34),  # the last block of a request has no commit
        (PROMPT_APART, 8, {}, 8, 34),
        (PROMPT_APART + COMMIT_APART, 8, {}, 8.5, 36),
        (OVERLAPPED, 8, COUNTED, 9, 36),
        (COMMIT_APART, 8, COUNTED, 9, 36),
    ],
)
def test_commits_and_prompts_are_passes_and_no_denoise_steps(
    commits: int,
    canvas_passes: int,
    counted: dict[str, float],
    passes_per_block: float,
    passes: int,
) -> None:
    one = measurement("x", 0, commits, saved(canvas_passes, **counted), WORKLOAD)
    assert not one.problem
    assert (one.steps_per_block, one.passes_per_block) == (8, passes_per_block)
    assert one.tokens_per_pass == pytest.approx(128 / passes)


def test_an_autoregressive_model_has_one_pass_a_token() -> None:
    result = saved()
    del result["diffusion_canvas_positions"]
    workload = replace(WORKLOAD, schedule=ADAPTIVE, steps_per_block=None)
    one = measurement("tiny-ar", 0, NO_CANVAS, result, workload)
    assert one.tokens_per_pass == 1.0 and one.tokens_per_s == 256.0
    assert one.steps_per_block is None and one.passes_per_block is None


def test_the_reference_counts_its_own_passes() -> None:
    result = saved(denoise_steps=30, blocks=4, forward_passes=34)
    del result["diffusion_canvas_positions"]
    workload = replace(WORKLOAD, steps_per_block=None)
    one = measurement("transformers", 0, BUILTIN_PASSES, result, workload)
    assert (one.steps_per_block, one.passes_per_block) == (7.5, 8.0)  # without two prefills


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completed": 1, "failed": 1, "errors": ["", "boom"]}, "1 of 2 requests succeeded"),
        ({"output_lens": [64, 63]}, "[63] tokens instead of 64"),
        ({"diffusion_canvas_positions": 31 * 32}, "7.750 denoise steps per block instead of 8"),
    ],
)
def test_a_wrong_run_has_no_speed(changes: dict[str, Any], message: str) -> None:
    wrong = measured(OURS, **changes)
    assert message in wrong.problem
    assert all(getattr(wrong, name) is None for name in SPEEDS)
    assert all(getattr(measured(OURS), name) for name in SPEEDS)


def test_a_model_without_diffusion_counters_is_refused() -> None:
    result = saved()
    del result["diffusion_canvas_positions"]
    one = measurement(OURS, 0, OVERLAPPED, result, WORKLOAD)
    assert "no diffusion counters" in one.problem and one.tokens_per_s is None


def test_wrong_answers_have_no_speed() -> None:
    asked = [Question("add", str(i), "yes", frozenset({"yes"})) for i in range(20)]
    workload = Workload(ADAPTIVE, 20, SHAPE, concurrency=1)

    def answered(right: int) -> Measurement:
        result = saved(
            completed=20,
            output_lens=[3] * 20,
            ttfts=[0.1] * 20,
            latencies=[0.1] * 20,
            generated_texts=[" yes\n"] * right + ["no"] * (20 - right),
            diffusion_canvas_positions=40 * 32,
        )
        one = measurement(OURS, 0, OVERLAPPED, result, workload, asked)
        ((_, judged),) = withhold([(workload, one)], {OURS: 0.9})
        return judged

    assert answered(17).num_correct == 17 and answered(17).tokens_per_s
    wrong = answered(8)
    assert wrong.num_correct == 8 and wrong.tokens_per_s is None
    assert wrong.problem.startswith("8 of 20 answers are right; by the model card at least 90.0 %")


def test_many_runs_are_judged_together() -> None:
    workload = Workload(ADAPTIVE, 60, SHAPE, concurrency=8)
    runs = [
        (workload, replace(measured(name, pair), num_requests=60, num_correct=right))
        for pair in range(6)
        for name, right in ((OURS, 51), (BUILTIN, 43))
    ]
    assert not accuracy_problem(43, 60, 0.85)  # one run does not show it
    judged = withhold(runs, {OURS: 0.85, BUILTIN: 0.85})
    for _, one in judged:
        assert (one.tokens_per_s is None) == (one.contestant == BUILTIN)
        assert ("258 of 360" in one.problem) == (one.contestant == BUILTIN)


def test_the_tail_of_a_binomial() -> None:
    assert binomial_tail(1, 3, 0.5) == pytest.approx(0.5)
    assert binomial_tail(3, 3, 0.5) == pytest.approx(1.0)
    assert binomial_tail(0, 4, 0.25) == pytest.approx(0.75**4)


def test_without_a_card_one_right_answer_is_enough() -> None:
    assert accuracy_problem(1, 100, None) == ""
    assert accuracy_problem(0, 100, None) == "none of 100 answers is right"


def test_the_expected_share_is_the_least_that_the_model_card_allows(tmp_path: Path) -> None:
    assert card_accuracy(tmp_path) is None
    (tmp_path / "README.md").write_text(
        "# A\n\n| add | 3.0 % |\n\n## Held-out answers correct\n\nOf 100 questions.\n\n"
        "| family | dllm, vllm serve | transformers generate |\n|---|---|---|\n"
        "| add | 1.0 % | 40.0 % [1 .. 80], 5.1 steps |\n| sort | 2.0 % | 80.0 % |\n"
        "| all | 1.5 % | 10.0 % |\n\n"
        "## Limits\n\n| x | 1 % | 2 % |\n"
    )
    assert card_accuracy(tmp_path) == pytest.approx(wilson_interval(60, 100)[0])
    for name, share in (("tiny-dllm", 0.992), ("tiny-ar", 0.996)):
        least = card_accuracy(ROOT / "checkpoints" / name)
        assert least is not None and share - 0.01 < least < share


def test_a_cut_block_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the canvas length 32"):
        Shape(canvas_length=32, input_len=1, output_len=40)


# --- the gate ------------------------------------------------------------------------------------


class FakeServer(Server):
    """Answers without a process, and can stand still; ``sloppy`` ignores the seed.

    ``answers`` are given first, one each.
    """

    port = 1
    is_paused = False

    def __init__(self, name: str, *answers: Response, sloppy: bool = False) -> None:
        self.options = ServerOptions(name, "model", ())
        self.sloppy, self.answers = sloppy, list(answers)
        self.bodies: list[dict[str, Any]] = []

    def complete(self, **body: Any) -> Response:
        self.bodies.append(body)
        if self.answers:
            return self.answers.pop(0)
        first = len(self.bodies) if self.sloppy else 0
        return Response(200, (first,) * body["max_tokens"])

    def counters(self) -> dict[str, float]:
        return {}

    def pause(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume(self) -> None:
        assert self.is_paused
        self.is_paused = False


def contestant(name: str, server: Server | None = None, **more: Any) -> Contestant:
    return Contestant(name, MODEL, COMMITS.get(name, OVERLAPPED), server, **more)


def test_the_gate_names_each_wrong_answer() -> None:
    wrong = FakeServer(OURS, Response(200, (1, 2)), Response(400, error="temperature"))
    with pytest.raises(GateError) as refused:
        admit(contestant(OURS, wrong), SHAPE)
    assert str(refused.value).splitlines() == [
        "ours: 2 tokens instead of 64",
        "ours: HTTP 400 instead of 200: temperature",
    ]


def test_the_gate_refuses_a_server_that_ignores_seeds() -> None:
    with pytest.raises(GateError, match="two equal requests with a seed agree in 0 tokens"):
        admit(contestant(OURS, FakeServer(OURS, sloppy=True)), SHAPE)
    admit(contestant(OURS, FakeServer(OURS)), SHAPE)


def test_the_builtin_is_not_sent_a_seed() -> None:
    builtin = FakeServer(BUILTIN, sloppy=True)
    admit(contestant(BUILTIN, builtin, takes_seeds=False), SHAPE)
    assert all("seed" not in body and "temperature" not in body for body in builtin.bodies)


def test_the_gate_sends_the_largest_batch_too() -> None:
    server = FakeServer(OURS)
    admit(contestant(OURS, server), SHAPE, at_once=5)
    assert len(server.bodies) == 3 + 5


def test_no_table_and_no_file_when_the_gate_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> list[Any]:
        raise GateError("ours: 3 tokens instead of 64")

    monkeypatch.setattr(serve, "measure", fail)
    assert serve.main(["--model", str(MODEL), "--results", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "ours: 3 tokens instead of 64" in printed.err
    assert list(tmp_path.iterdir()) == []


# --- who runs what -------------------------------------------------------------------------------


class FakeClient:
    """Notes who is driven, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driven: list[str] = []
        self.seeds: list[str] = []

    def bench_serve(self, name: str, url: str, model: str, flags: list[str]) -> dict[str, Any]:
        self.driven.append(name.split("-")[0])
        self.seeds.append(flags[flags.index("--seed") + 1])
        return saved()


def test_a_run_that_saves_nothing_has_not_the_result_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are named by the letters of a contestant's name: "fixed 7" and "fixed 15" share one."""
    monkeypatch.setattr("bench.client.child_environment", dict)
    client = Client(tmp_path)
    client._context = multiprocessing.get_context("spawn")  # type: ignore[assignment]
    (tmp_path / "fixed_-0.json").write_text("{}")
    with pytest.raises(RuntimeError, match="fixed_-0 failed with code 0"):
        client._call("fixed_-0", print, "nothing is saved")


def test_the_others_stand_still() -> None:
    servers = [FakeServer(name) for name in "abc"]
    racing = [
        *(contestant(server.options.name, server) for server in servers),
        contestant("hf", None),
    ]

    def paused() -> list[bool]:
        return [server.is_paused for server in servers]

    with undisturbed(servers[1], racing):  # type: ignore[arg-type]
        assert paused() == [True, False, True]
    with pytest.raises(RuntimeError, match="failed"), undisturbed(None, racing):
        assert paused() == [True, True, True]
        raise RuntimeError("failed")
    assert paused() == [False, False, False]


def test_servers_start_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    racing = [contestant(name, FakeServer(name)) for name in "abc"]
    started: list[tuple[list[str], list[bool]]] = []

    def start(some: list[Contestant], *_: object) -> None:
        still = [one.server.is_paused for one in racing]  # type: ignore[union-attr]
        started.append(([one.name for one in some], still))

    monkeypatch.setattr(race, "start_all", start)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    race.start_in_turn(racing, SHAPE, 1, ExitStack())
    assert started == [(["a", "b"], [False] * 3), (["c"], [True, True, False])]
    assert not any(one.server.is_paused for one in racing)  # type: ignore[union-attr]


def test_a_run_has_what_it_added_to_the_counters(tmp_path: Path) -> None:
    class Counting(FakeServer):
        passes = 0.0

        def counters(self) -> dict[str, float]:
            self.passes += 10
            emitted = 64 * (self.passes - 10)  # of 20 blocks, by this run
            return {"commit_passes": self.passes, "diffusion_num_committed_tokens": emitted}

    one = contestant("a", Counting("a"))
    ((_, found),) = Race([one], [WORKLOAD], 1, FakeClient(tmp_path)).run()  # type: ignore[arg-type]
    assert found.passes_per_block == 8.5


def test_our_counters_are_read_from_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """# TYPE dllm:draft_passes_total counter
dllm:draft_passes_total{engine="0"} 3.0
dllm:draft_passes_total{engine="1"} 4.0
# TYPE dllm:draft_passes_created gauge
dllm:draft_passes_created{engine="0"} 1e9
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0"} 5.0
# TYPE vllm:diffusion_num_committed_tokens_total counter
vllm:diffusion_num_committed_tokens_total{engine="0"} 64.0
"""
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(text.encode()))
    expected = {"draft_passes": 7.0, "diffusion_num_committed_tokens": 64.0}
    assert Server(ServerOptions("a", "model", ()), Path("log")).counters() == expected


def test_each_round_begins_with_another_contestant(tmp_path: Path) -> None:
    client = FakeClient(tmp_path)
    three = [contestant(name, FakeServer(name)) for name in ("a", "b", "c")]
    results = Race(three, [WORKLOAD], 3, client).run()  # type: ignore[arg-type]
    assert client.driven == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [one.pair for _, one in results] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_no_two_workloads_or_rounds_share_prompts(tmp_path: Path) -> None:
    """Their answers are judged together, as independent ones."""
    client = FakeClient(tmp_path)
    loads = [WORKLOAD, replace(WORKLOAD, concurrency=8)]
    two = [contestant(name, FakeServer(name)) for name in ("a", "b")]
    Race(two, loads, 3, client).run()  # type: ignore[arg-type]
    assert client.seeds == ["0", "0", "1", "1", "2", "2", "3", "3", "4", "4", "5", "5"]


def test_rounds_end_with_the_budget_but_one_is_always_run(tmp_path: Path) -> None:
    client = FakeClient(tmp_path)
    Race([contestant("a", FakeServer("a"))], [WORKLOAD], 9, client, budget_s=0).run()  # type: ignore[arg-type]
    assert client.driven == ["a"]


def test_a_race_that_is_interrupted_is_not_lost(tmp_path: Path) -> None:
    seen: list[int] = []
    client = FakeClient(tmp_path)
    loads = [WORKLOAD, replace(WORKLOAD, concurrency=8)]
    race = Race([contestant("a", FakeServer("a"))], loads, 2, client)  # type: ignore[arg-type]
    race.run(lambda so_far: seen.append(len(so_far)))
    assert seen == [1, 2, 3, 4]


def test_who_takes_which_workload(tmp_path: Path) -> None:
    questions = Workload(ADAPTIVE, 2, SHAPE, concurrency=1)
    options = serve.parse(["--model", str(MODEL)])
    by_name = {one.name: one for one in serve.contestants(options, ADAPTIVE, tmp_path)}
    eight = replace(questions, concurrency=8)
    assert all(by_name[name].takes(eight) for name in (OURS, "tiny-ar"))
    assert by_name["transformers"].takes(questions) and not by_name["transformers"].takes(eight)
    (tmp_path / "fixed").mkdir()  # those without denoise steps to fix, or at batch 1, stay away
    fixed = serve.contestants(options, FIXED, tmp_path / "fixed")
    assert [one.name for one in fixed] == [OURS, BUILTIN]


def test_the_servers_differ_in_one_environment_variable(tmp_path: Path) -> None:
    options = serve.parse(["--model", str(MODEL), "--eager", "--contestants", OURS, BUILTIN])
    ours, builtin = serve.contestants(options, FIXED, tmp_path)
    assert ours.server and builtin.server
    assert ours.server.options.flags == builtin.server.options.flags
    assert "--enforce-eager" in ours.server.options.flags
    assert ours.server.options.environment == ()
    assert builtin.server.options.environment == (("DLLM_DISABLE", "1"),)


def test_a_contestant_is_a_kind_and_flags(tmp_path: Path) -> None:
    wide, separate = "built-in --max-num-seqs 32", "ours --additional-config.dllm.commit separate"
    alone = "ours --additional-config.dllm.first_step separate"
    options = serve.parse(["--model", str(MODEL), "--contestants", OURS, wide, separate, alone])
    ours, builtin, other, apart = serve.contestants(options, ADAPTIVE, tmp_path)
    assert (builtin.name, builtin.commits) == (wide, BUILTIN_PASSES)
    assert builtin.server and builtin.server.options.flags[-2:] == ("--max-num-seqs", "32")
    assert dict(builtin.server.options.environment) == {"DLLM_DISABLE": "1"}
    assert (ours.commits, other.commits) == (OVERLAPPED, COMMIT_APART)
    assert apart.commits == PROMPT_APART
    both = (
        """ours --additional-config '{"dllm": {"commit": "separate", "first_step": "separate"}}'"""
    )
    assert serve.Spec.parse(both).commits == PROMPT_APART + COMMIT_APART


@pytest.mark.parametrize("text", ["theirs", "ours flag"])
def test_an_unknown_contestant_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.parse(["--model", str(MODEL), "--contestants", text])
    assert "allowed: one of ours, built-in, tiny-ar, transformers" in capsys.readouterr().err


def test_a_missing_twin_is_said_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = serve.parse(["--model", str(MODEL), "--autoregressive", "/nowhere/tiny-ar"])
    assert "tiny-ar" not in [one.kind for one in options.contestants]
    assert "/nowhere/tiny-ar is not there: no column of tiny-ar" in capsys.readouterr().err


def test_the_twin_is_served_like_the_others(tmp_path: Path) -> None:
    given = ["--model", str(MODEL), "--autoregressive", str(MODEL), "--contestants", "tiny-ar"]
    options = serve.parse([*given, "--serve-flags=--x"])
    for name in "ab":
        (tmp_path / name).mkdir()
    (twin,) = serve.contestants(options, ADAPTIVE, tmp_path / "a")
    assert twin.commits == NO_CANVAS and twin.client_flags == ("--temperature", "0")
    assert twin.server and twin.server.options.environment == ()
    assert twin.server.options.flags == ("--x",)
    assert serve.contestants(options, FIXED, tmp_path / "b") == []


def test_the_client_sends_no_sampling_parameter(tmp_path: Path) -> None:
    for workload in (WORKLOAD, Workload(ADAPTIVE, 2, SHAPE, rate=4.0)):
        flags = workload.client_flags(3, tmp_path / "questions.json")
        line = command("http://x", "model", flags, tmp_path, "r.json")
        assert line[:2] == ["bench", "serve"] and "--save-detailed" in line
        assert not {"--temperature", "--min-p", "--top-p", "--top-k"} & set(line)


def test_questions_are_mixed_and_differ_between_rounds() -> None:
    first, second = draw_questions(25, seed=0), draw_questions(25, seed=1)
    assert [one.family for one in first[: len(FAMILIES)]] == list(FAMILIES)
    assert len({one.prompt for one in first}) == 25
    assert [one.prompt for one in first] != [one.prompt for one in second]


# --- output --------------------------------------------------------------------------------------


def test_ratios_are_of_pairs_that_both_ran() -> None:
    runs = [
        measured(OURS, pair=0, output_throughput=200.0),
        measured(BUILTIN, pair=0, output_throughput=100.0),
        measured(BUILTIN, pair=1, output_throughput=10.0),
        measured(OURS, pair=1, output_throughput=15.0),
        measured(OURS, pair=2),
        measured(BUILTIN, pair=2, output_lens=[1, 1]),
    ]
    ours, builtin = (
        rows_of([one for one in runs if one.contestant == name]) for name in (OURS, BUILTIN)
    )
    assert ratios(ours, builtin, "tokens_per_s") == "1.75 [1.50 .. 2.00]"
    assert ratios(ours, [], "tokens_per_s") == "-"
    assert Spread.of([2.0, 1.5, 1.0]).text(1) == "1.5 [1.0 .. 2.0]"


def test_the_table_shows_both_sides_the_ratio_and_what_was_wrong() -> None:
    text = load_tables(rows_of([measured(OURS), measured(BUILTIN, output_throughput=128.0)]))
    ours, builtin = (line for line in text.splitlines() if line.startswith("| 1 at once"))
    assert "256 [256 .. 256]" in ours and "128 [128 .. 128]" in builtin
    assert builtin.endswith("2.00 [2.00 .. 2.00] |")
    assert "No speed" not in text
    wrong = load_tables(rows_of([measured(OURS), measured(BUILTIN, output_lens=[1, 1])]))
    (line,) = (line for line in wrong.splitlines() if "| built-in | -" in line)
    assert line.endswith("| - |")
    assert "* built-in: [1, 1] tokens instead of 64" in wrong


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
