"""What the serving benchmark makes of a run: numbers, refusals, turns, tables. No servers."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import local, race, serve
from bench.context import GateError, Row, Rows, read_csv, write_csv
from bench.race import Contestant, admit, rounds, undisturbed, withhold
from bench.runs import (
    ADAPTIVE,
    BUILTIN_PASSES,
    FIXED,
    NO_CANVAS,
    OVERLAPPED,
    SPEEDS,
    UNCOUNTED,
    Shape,
    Workload,
    bench_serve,
    draw_questions,
    figures,
)
from bench.serve import BUILTIN, OURS, Spec
from bench.servers import Server
from bench.tables import load_tables, ratios, spread
from bench.toys.suite import FAMILIES, Question

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "checkpoints/tiny-dllm"
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
        "output_throughput": 256.0,
        "output_lens": [64, 64],
        "ttfts": [0.1, 0.2],
        "latencies": [0.24, 0.26],
        "generated_texts": ["", ""],
        "diffusion_canvas_positions": passes_per_block * 4 * 32,
    } | changes


def measured(name: str, pair: int = 0, **changes: Any) -> Row:
    found = figures(COMMITS[name], saved(9 if name == BUILTIN else 8, **changes), WORKLOAD)
    load = {"schedule": FIXED, "concurrency": 1, "rate": None}
    return {"contestant": name, "pair": pair, **load, **found}


# --- numbers -------------------------------------------------------------------------------------


def test_numbers_of_a_run() -> None:
    ours, builtin = measured(OURS), measured(BUILTIN)
    assert ours["tokens_per_s"] == 256.0
    assert ours["ttft_ms"] == pytest.approx(150.0)
    assert ours["latency_ms"] == pytest.approx(250.0)
    assert ours["latency_p99_ms"] == pytest.approx(259.8)
    # 500 ms for 4 blocks of 8 denoise steps.
    assert ours["ms_per_denoise_step"] == builtin["ms_per_denoise_step"] == 500 / 32
    # 128 tokens; the built-in commits each block in a pass more.
    assert (ours["tokens_per_pass"], builtin["tokens_per_pass"]) == (128 / 32, 128 / 36)


# Of six blocks: a request warmed the server up.
COUNTED = {"commit_passes": 6.0, "diffusion_num_committed_tokens": 6.0 * 32}


@pytest.mark.parametrize(
    ("commits", "canvas_passes", "counted", "passes_per_block"),
    [
        (OVERLAPPED, 8, {}, 8),
        (BUILTIN_PASSES, 9, {}, 9),
        (OVERLAPPED, 8, COUNTED, 9),
    ],
)
def test_commits_are_passes_and_no_denoise_steps(
    commits: str, canvas_passes: int, counted: dict[str, float], passes_per_block: float
) -> None:
    one = figures(commits, saved(canvas_passes, **counted), WORKLOAD)
    assert not one["problem"]
    assert (one["steps_per_block"], one["passes_per_block"]) == (8, passes_per_block)


def test_an_autoregressive_model_has_a_token_a_step_and_the_drafts_that_it_accepts() -> None:
    result = saved(spec_decode_num_drafts=32, spec_decode_accepted_tokens=64)
    del result["diffusion_canvas_positions"]
    workload = replace(WORKLOAD, schedule=ADAPTIVE, steps_per_block=None)
    one = figures(NO_CANVAS, result, workload)
    assert one["steps_per_block"] is None and one["passes_per_block"] is None
    assert (one["tokens_per_pass"], one["acceptance_length"]) == (2.0, 3.0)
    # Self-speculation drafts a whole canvas, and accepts what is behind the answer's end.
    behind_end = figures(NO_CANVAS, result | {"spec_decode_accepted_tokens": 200}, workload)
    assert behind_end["tokens_per_pass"] is None


def test_canvases_of_many_widths_have_passes_but_no_blocks() -> None:
    """80 passes over 5 positions each, of which the client takes 20 for commits."""
    workload = replace(WORKLOAD, schedule=ADAPTIVE, steps_per_block=None)
    counted = {"canvas_positions": 400, "committed_tokens": 100, "denoising_steps": 60}
    named = {f"diffusion_{name}": count for name, count in counted.items()}
    one = figures(UNCOUNTED, saved(**named), workload)
    assert one["tokens_per_s"] and not one["problem"]
    assert one["steps_per_block"] is None and one["tokens_per_pass"] == 128 / 80


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"completed": 1, "failed": 1, "errors": ["", "boom"]},
        {"output_lens": [64, 63]},
        {"diffusion_canvas_positions": 31 * 32},  # 7.75 denoise steps a block instead of 8
        {"diffusion_canvas_positions": 0},
    ],
)
def test_a_wrong_run_has_no_speed(changes: dict[str, Any]) -> None:
    wrong = measured(OURS, **changes)
    assert wrong["problem"] and all(wrong[name] is None for name in SPEEDS)
    assert all(measured(OURS)[name] for name in SPEEDS)


def test_right_answers_are_counted() -> None:
    asked = [Question("add", str(i), "yes", frozenset({"yes"})) for i in range(2)]
    result = saved(output_lens=[3, 3], generated_texts=[" yes\n", "no"])
    workload = Workload(ADAPTIVE, 2, SHAPE, concurrency=1)
    assert figures(OVERLAPPED, result, workload, asked)["num_correct"] == 1


def answered(name: str, right: int, asked: int = 100) -> Row:
    return {**measured(OURS), "contestant": name, "num_correct": right, "num_requests": asked}


def test_far_fewer_right_answers_than_the_best_ones_have_no_speed() -> None:
    turn = [answered("a", 99), answered("b", 97), answered("c", 70), measured(OURS)]
    assert [bool(row["tokens_per_s"]) for row in withhold(turn)] == [True, True, False, True]
    # What one run does not show, many do.
    once = [answered("a", 99), answered("b", 93)]
    assert not any(row["problem"] for row in withhold(once))
    assert [bool(row["problem"]) for row in withhold(20 * once)] == 20 * [False, True]


def test_no_right_answer_is_a_mistake_even_where_nobody_has_one() -> None:
    assert all(row["problem"] for row in withhold([answered("a", 0), answered("b", 0)]))


# --- the gate ------------------------------------------------------------------------------------


class FakeServer(Server):
    """Answers without a process, and can stand still; ``sloppy`` ignores the seed."""

    port = 1
    is_paused = False

    def __init__(self, name: str, num_tokens: int = 64, sloppy: bool = False) -> None:
        self.name = self.model = name
        self.sloppy, self.num_tokens = sloppy, num_tokens
        self.bodies: list[dict[str, Any]] = []

    def wait_until_ready(self) -> None:
        """It is."""

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        self.bodies.append(body)
        first = len(self.bodies) if self.sloppy else 0
        return {"choices": [{"token_ids": [first] * self.num_tokens}]}

    def counters(self) -> dict[str, float]:
        return {}

    def pause(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume(self) -> None:
        assert self.is_paused
        self.is_paused = False


def contestant(name: str, server: Server | None = None, **more: Any) -> Contestant:
    return Contestant(name, server or FakeServer(name), OVERLAPPED, **more)


def test_the_gate_refuses_other_lengths_and_who_ignores_seeds() -> None:
    with pytest.raises(GateError, match=r"\[2\] tokens instead of 64"):
        admit(contestant(OURS, FakeServer(OURS, num_tokens=2)), SHAPE)
    with pytest.raises(GateError, match="two equal requests"):
        admit(contestant(OURS, FakeServer(OURS, sloppy=True)), SHAPE)


def test_the_gate_sends_the_largest_batch_and_no_seed_to_the_builtin() -> None:
    ours, builtin = FakeServer(OURS), FakeServer(BUILTIN, sloppy=True)
    admit(contestant(OURS, ours), SHAPE, at_once=5)
    assert len(ours.bodies) == 3 + 5
    admit(contestant(BUILTIN, builtin, takes_seeds=False), SHAPE)
    assert all("seed" not in body and "temperature" not in body for body in builtin.bodies)


def test_no_table_and_no_file_when_the_gate_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise GateError("ours: 3 tokens instead of 64")

    monkeypatch.setattr(serve, "measure", fail)
    assert serve.main(["--model", str(MODEL), "--results", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "ours: 3 tokens instead of 64" in printed.err
    assert list(tmp_path.iterdir()) == []


# --- engines without HTTP ------------------------------------------------------------------------


class FakeLLM:
    """Answers in a second with as many tokens as there are letters."""

    @classmethod
    def from_engine_args(cls, _: object) -> "FakeLLM":
        return cls()

    def get_default_sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def chat(self, chats: list[Any], *_: object, **__: object) -> list[SimpleNamespace]:
        texts = [chat[0]["content"] for chat in chats]
        answers = [SimpleNamespace(text=text, token_ids=[*text]) for text in texts]
        return [SimpleNamespace(outputs=[answer]) for answer in answers]


def test_an_engine_answers_batch_after_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for its batch. What is asked before the clock starts does not count."""
    monkeypatch.setattr("vllm.LLM", FakeLLM)
    monkeypatch.setattr(local.time, "perf_counter", iter(range(100)).__next__)
    asked = [Question("add", text, text, frozenset({text})) for text in ("a", "bb", "ccc", "dd")]
    found = local.chat(str(MODEL), [], asked, 2)
    assert found["output_throughput"] == (1 + 2 + 3 + 2) / 2 and found["latencies"] == [1] * 4
    row = figures(UNCOUNTED, found, Workload(ADAPTIVE, 4, SHAPE, concurrency=2), asked)
    assert not row["problem"] and row["tokens_per_s"] == 4.0 and row["steps_per_block"] is None
    assert row["num_correct"] == 4


def test_without_http_engines_take_questions_in_whole_batches(tmp_path: Path) -> None:
    options = serve.parse(["--model", str(MODEL), "--no-http"])
    racing = serve.contestants(options, ADAPTIVE, tmp_path)
    assert all(one.answer and not one.server for one in racing)
    assert (options.schedule, options.file) == ([ADAPTIVE], serve.ENGINE)
    sizes = [(load.concurrency, load.num_requests) for load in serve.workloads(options, ADAPTIVE)]
    assert sizes == [(1, 100), (8, 104), (32, 128)]


def test_an_autoregressive_target_takes_questions_alone() -> None:
    options = serve.parse(["--model", str(MODEL.parent / "tiny-ar"), "--contestants", OURS])
    assert options.schedule == [ADAPTIVE] and options.shape.canvas_length == 1


# --- turns ---------------------------------------------------------------------------------------


def test_the_others_stand_still() -> None:
    servers = [FakeServer(name) for name in "abc"]
    racing = [
        *(contestant(one.name, one) for one in servers),
        Contestant("hf", one_by_one=True),
    ]
    with undisturbed(servers[1], racing):
        assert [server.is_paused for server in servers] == [True, False, True]
    with pytest.raises(RuntimeError, match="failed"), undisturbed(None, racing):
        assert all(server.is_paused for server in servers)
        raise RuntimeError("failed")
    assert not any(server.is_paused for server in servers)


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Who is driven, with which seed, in order."""
    found: list[tuple[str, str]] = []

    def bench_serve(url: str, model: str, flags: list[str]) -> dict[str, Any]:
        found.append((model, flags[flags.index("--seed") + 1]))
        return saved()

    monkeypatch.setattr(race, "bench_serve", bench_serve)
    return found


def raced(names: str, num_rounds: int, *loads: Workload) -> list[list[Row]]:
    """The rows of a race behind each of its loads."""
    racing = [contestant(name) for name in names]
    return list(race.race_workloads(racing, loads, range(num_rounds)))


def test_each_round_begins_with_another_contestant(driven: list[tuple[str, str]]) -> None:
    *_, rows = raced("abc", 3, WORKLOAD)
    assert "".join(name for name, _ in driven) == "abcbcacab"
    assert [row["pair"] for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_no_two_workloads_or_rounds_share_prompts_and_all_is_saved(
    driven: list[tuple[str, str]],
) -> None:
    """Their answers are judged together, as independent ones."""
    saves = raced("ab", 2, WORKLOAD, replace(WORKLOAD, concurrency=8))
    assert "".join(seed for _, seed in driven) == "00112233"
    assert [len(rows) for rows in saves] == [2, 4, 6, 8]


def test_a_load_that_nobody_takes_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables of an earlier run are not shown in place of what was not measured."""
    alone = Contestant("transformers", one_by_one=True)
    one, eight = (replace(WORKLOAD, concurrency=n) for n in (1, 8))
    found = race.race([alone], (eight, one), range(1), lambda _, load, __: {"load": load})
    assert [row["load"] for (row,) in found] == [one]
    assert f"nobody takes {eight.name}; it is left out" in capsys.readouterr().err
    options = ["--model", str(MODEL), "--contestants", "transformers", "--results", str(tmp_path)]
    assert serve.main([*options, "--concurrency", "8", "--rates", "--rounds", "1"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "no load has a contestant" in said.err


def test_rounds_end_with_the_budget_but_one_is_always_run() -> None:
    assert list(rounds(9, budget_s=0)) == [0] and list(rounds(2)) == [0, 1]


# --- who is measured -----------------------------------------------------------------------------


def test_who_takes_which_workload(tmp_path: Path) -> None:
    options = serve.parse(["--model", str(MODEL)])
    one, eight = (Workload(ADAPTIVE, 2, SHAPE, concurrency=n) for n in (1, 8))
    by_name = {each.name: each for each in serve.contestants(options, ADAPTIVE, tmp_path)}
    assert all(by_name[name].takes(eight) for name in (OURS, "tiny-ar"))
    assert by_name["transformers"].takes(one) and not by_name["transformers"].takes(eight)
    (tmp_path / "fixed").mkdir()  # those without denoise steps to fix, or at batch 1, stay away
    fixed = serve.contestants(options, FIXED, tmp_path / "fixed")
    assert [each.name for each in fixed] == [OURS, BUILTIN]


def test_a_contestant_is_a_kind_and_flags(tmp_path: Path) -> None:
    wide, causal = "built-in --max-num-seqs 32", "ours --additional-config.dllm.decoding ar"
    options = serve.parse(["--model", str(MODEL), "--contestants", OURS, wide, causal])
    ours, builtin, other = serve.contestants(options, ADAPTIVE, tmp_path)
    assert (builtin.name, builtin.commits) == (wide, BUILTIN_PASSES)
    assert builtin.server and builtin.server.flags[-2:] == ("--max-num-seqs", "32")
    assert (ours.commits, other.commits) == (OVERLAPPED, NO_CANVAS)
    as_json = """ours --additional-config '{"dllm": {"decoding": "self_speculation"}}'"""
    assert Spec.parse(as_json).commits == NO_CANVAS


def test_no_sampling_parameter_is_sent(tmp_path: Path) -> None:
    for workload in (WORKLOAD, Workload(ADAPTIVE, 2, SHAPE, rate=4.0)):
        flags = workload.client_flags(3, tmp_path / "questions.jsonl")
        assert not {"--temperature", "--min-p", "--top-p", "--top-k"} & set(flags)


def test_of_a_file_the_client_gets_prompts_and_no_conversations(tmp_path: Path) -> None:
    given, written = tmp_path / "prompts.jsonl", tmp_path / "written.jsonl"
    prompt, said = {"prompt": "Hello"}, [{"role": "user", "content": "Hello"}]
    given.write_text("".join(f"{json.dumps(one)}\n" for one in (prompt, {"messages": said})))
    flags = Workload(ADAPTIVE, 2, SHAPE, concurrency=1, prompts=given).client_flags(3, written)
    assert flags[flags.index("--dataset-path") + 1] == str(written)
    assert [json.loads(line) for line in written.read_text().splitlines()] == [prompt]


def test_a_client_that_fails_says_why() -> None:
    flags = ["--dataset-name", "random", "--max-concurrency", "0"]
    with pytest.raises(RuntimeError, match="--max-concurrency must be greater than 0"):
        bench_serve("http://127.0.0.1:1", str(MODEL), flags)


def test_questions_are_mixed_and_differ_between_rounds() -> None:
    first, second = draw_questions(25, seed=0), draw_questions(25, seed=1)
    assert [one.family for one in first[: len(FAMILIES)]] == list(FAMILIES)
    assert len({one.prompt for one in first}) == 25
    assert [one.prompt for one in first] != [one.prompt for one in second]


# --- output --------------------------------------------------------------------------------------


def as_text(rows: list[Row], folder: Path) -> Rows:
    write_csv(folder / "rows.csv", rows)
    return read_csv(folder / "rows.csv")


def test_ratios_are_of_pairs_that_both_ran(tmp_path: Path) -> None:
    speeds = {(OURS, 0): 200.0, (BUILTIN, 0): 100.0, (BUILTIN, 1): 10.0, (OURS, 1): 15.0}
    runs = [measured(name, pair, output_throughput=x) for (name, pair), x in speeds.items()]
    runs += [measured(OURS, pair=2), measured(BUILTIN, pair=2, output_lens=[1, 1])]
    rows = as_text(runs, tmp_path)
    ours, builtin = ([r for r in rows if r["contestant"] == name] for name in (OURS, BUILTIN))
    assert ratios(ours, builtin, "tokens_per_s") == "1.75 [1.50 .. 2.00]"
    assert ratios(ours, [], "tokens_per_s") == "-"
    assert spread(builtin, "tokens_per_s") == "55.0 [10.0 .. 100.0]"


def test_the_table_shows_both_sides_the_ratio_and_what_was_wrong(tmp_path: Path) -> None:
    found = [measured(OURS), measured(BUILTIN, output_throughput=128.0)]
    text = load_tables(as_text(found, tmp_path))
    ours, builtin = (line for line in text.splitlines() if line.startswith("| 1 at once"))
    assert "| 256 |" in ours and "| 128 |" in builtin
    assert builtin.endswith("| 2.00 |") and "No speed" not in text
    found = [measured(OURS), measured(BUILTIN, output_lens=[1, 1])]
    wrong = load_tables(as_text(found, tmp_path))
    (line,) = (line for line in wrong.splitlines() if "| built-in | -" in line)
    assert line.endswith("| - |") and "* built-in: [1, 1] tokens instead of 64" in wrong
