"""Known shares of right answers give known scores; the reference counts its steps."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.servers import counters
from bench.toys import evaluate, prompts
from bench.toys.evaluate import PASSES, Answer, chosen_families, denoise_counts, wilson_interval
from bench.toys.suite import DECISION_FAMILIES, FAMILIES, TOOL_FAMILIES, questions
from dllm.settings.command import CommandError
from dllm.tools import decisions
from dllm.train.responses import Prompt, load_prompts
from dllm.train.settings import DrafterTraining
from tests.support.chat_stub import Stub, serve
from tests.support.toy_prompts import encode_prompt

TOKENIZER = Tokenizer.from_file("checkpoints/tiny-ar/tokenizer.json")


def right_but_every(nth: int, families: list[str], num: int):
    """Answers held-out questions rightly, but for every nth of each family."""
    answers = {}
    for family in families:
        for index, drawn in enumerate(questions([family], "heldout", num)):
            answers[drawn.prompt] = "no idea" if index % nth == 0 else drawn.answer

    def reply(messages: list[dict[str, str]]) -> str:
        (message,) = messages
        return f" {answers[message['content']]}\n"

    return reply


# --------------------------------------------------------------------------------------------------
# Numbers


# Newcombe, Statistics in Medicine 17 (1998), table I, method 3; and Wilson's limits at 0 and 1.
@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_the_wilson_interval(right: int, asked: int, low: float, high: float) -> None:
    assert wilson_interval(right, asked) == pytest.approx((low, high), abs=5e-5)


def test_counters_are_summed_over_labels_and_found_by_their_whole_name() -> None:
    name = f"vllm:{PASSES}_total"
    text = f'{name}{{engine="0"}} 3.0\n{name}{{engine="1"}} 4.0\n{name}_x{{}} 9.0\n'
    assert counters(text)[PASSES] == 7
    assert counters("")[PASSES] == 0
    assert counters(f'{name}{{model_name="my models/a b"}} 5.0\n')[PASSES] == 5


def test_blocks_are_output_tokens_in_canvas_widths_rounded_up() -> None:
    before = Stub(str, passes=5)
    after = Stub(str, passes=5, requests=[{}, {}])
    answers = [Answer("", 33), Answer("", 32)]  # two blocks and one
    assert denoise_counts(before.metrics(), after.metrics(), answers) == (10, 3)
    assert denoise_counts(before.metrics(), before.metrics(), answers) == (0, 0)
    assert denoise_counts("", "", answers) == (0, 0)


# --------------------------------------------------------------------------------------------------
# Against a server


def test_a_server_with_known_answers_gets_a_known_score(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """40 questions a family, every fifth answered wrongly, 33 tokens (two blocks), 12 passes."""
    reply = right_but_every(5, ["sort", "prose"], 40)
    with serve(Stub(reply, num_tokens=33, passes=12)) as stub:
        arguments = ["--base-url", stub.url, "--tasks", "prose, sort", "--num", "40"]
        assert evaluate.main([*arguments, "--api-key", "s3cret", "--seed", "100"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[1]: line for line in shown if "80.0%" in line}
    assert list(rows) == ["sort", "prose", "all"]
    for row in rows.values():
        assert {"33.0", "6.00", "2.75"} <= {*row}  # tokens, steps of a block, tokens a step
    assert {"32/40", "65.2-89.5"} <= {*rows["sort"]} and "64/80" in rows["all"]
    drawn = questions(["sort"], "heldout", 40)
    # Every question once, and request i of a family with seed + i.
    assert len(stub.requests) == 80
    seeds = {r["messages"][0]["content"]: r["seed"] for r in stub.requests}
    assert [seeds[q.prompt] for q in drawn] == list(range(100, 140))
    assert {r["max_tokens"] for r in stub.requests} == {128}
    assert all("temperature" not in r for r in stub.requests)


def test_a_server_that_counts_no_canvases_gets_a_dash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve(Stub(right_but_every(10**9, ["add"], 3))) as stub:
        address = ["--base-url", f"{stub.url}/v1/", "--temperature", "0"]
        assert evaluate.main([*address, "--tasks", "add", "--num", "3"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "2/3" in line]
    assert "-" in row
    assert {r["temperature"] for r in stub.requests} == {0}
    assert all("seed" not in r for r in stub.requests)


def test_tools_are_sent_and_the_bare_answer_is_asked_for() -> None:
    """With the marks that a parser would take away; plain questions are sent as ever."""
    with serve(Stub(right_but_every(3, ["alarm", "add"], 12))) as stub:
        given = ["--base-url", stub.url, "--tasks", "add,alarm", "--num", "12"]
        assert evaluate.main(given) == 0
    sent = {r["messages"][0]["content"]: r for r in stub.requests}
    for item in questions(["alarm"], "heldout", 12):
        assert item.chat is not None
        body = sent[item.prompt]
        assert body.get("tools", []) == item.chat.schemas
        assert body["skip_special_tokens"] is False
        assert body["chat_template_kwargs"] == item.chat.template_kwargs
    for item in questions(["add"], "heldout", 12):
        assert set(sent[item.prompt]) == {"model", "messages", "max_tokens"}


def test_a_refusal_ends_the_evaluation_with_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Stub(str, status=400)) as stub:
        given = ["--base-url", stub.url, "--tasks", "add", "--num", "20"]
        assert evaluate.main(given) == 2
    assert "refused with HTTP 400" in capsys.readouterr().err
    assert len(stub.requests) < 20, "it goes on although it has failed"


def test_tasks_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen_families("all") == list(FAMILIES)
    assert chosen_families("tools") == list(TOOL_FAMILIES)
    assert chosen_families("sort, add") == ["add", "sort"]
    for wrong in ("add,sotr", " , "):
        with pytest.raises(CommandError, match=f"--tasks '{wrong}'; allowed: all, tools"):
            chosen_families(wrong)
    assert evaluate.main(["--tasks", "add", "--num", "9999"]) == 2
    assert "9999 questions of 'add'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--num", "0"), ("--temperature", "-1"), ("--temperature", "nan")],
)
def test_wrong_arguments_are_refused_with_status_2(flag: str, value: str) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluate.main([flag, value])
    assert ended.value.code == 2


# --------------------------------------------------------------------------------------------------
# Files


def test_a_file_of_questions_is_what_a_drafter_is_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With tiny-drafter's config: as many of each family, held-out ones first."""
    file, target = tmp_path / "toys.jsonl", Path("checkpoints/tiny-ar")
    assert prompts.main([str(file), "--heldout", "2", "--train", "3"]) == 0
    num = len(FAMILIES)
    found = load_prompts(target, file, DrafterTraining(heldout=2 * num, responses=3 * num))
    drawn = [*questions(FAMILIES, "heldout", 2), *questions(FAMILIES, "train", 3)]
    assert found == [
        Prompt(tuple(encode_prompt(TOKENIZER, one.prompt)), one.family, at < 2 * num)
        for at, one in enumerate(drawn)
    ]
    settings = DrafterTraining.load(Path("bench/toys/tiny-drafter.toml"))
    assert settings.heldout % num == settings.responses % num == 0
    assert prompts.main([str(file), "--heldout", "1000000"]) == 2
    assert "holds about" in capsys.readouterr().err


def test_a_file_of_decisions_is_one_of_typed_questions(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    assert prompts.main([str(file), "--heldout", "20", "--decisions"]) == 0
    lines = decisions.read_lines(file)
    assert [line["name"] for line in lines] == [
        name for name in DECISION_FAMILIES for _ in range(20)
    ]
    for line, one in zip(lines, questions(DECISION_FAMILIES, "heldout", 20), strict=True):
        decision = one.decision
        assert decision is not None
        assert (line["input"], line["question"]) == (decision.input, decision.question)
        if decision.odds is not None:
            assert (line.get("answer"), line["odds"]) == (None, decision.odds)
        elif decision.type == "predicate":
            assert ("no", "yes")[line["answer"]] == one.answer
        else:
            assert line["answer"] == one.answer
