"""The bundled model for typed decisions: how right it is; and the page /decisions in a browser."""

from collections.abc import Iterator

import pytest

from bench.toys.prompts import decision_line
from bench.toys.suite import DECISION_FAMILIES, questions
from dllm.tools import client, decisions
from tests.support.chromium import PAGES, Page, needs_chromium
from tests.support.server_harness import CHECKPOINTS, Server, serving

CHECKPOINT = CHECKPOINTS / "tiny-decisions"
KEY = "secret"
FLAGS = ("--enforce-eager", "--max-model-len=512", "--max-num-seqs=32", f"--api-key={KEY}")

pytest_plugins = ["tests.support.chromium"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serving(CHECKPOINT, tmp_path_factory, FLAGS, PAGES)


@pytest.fixture
def page(browser: Page, server: Server) -> Page:
    browser.open(f"{server.url}/decisions")
    browser.fill("#key", KEY)
    return browser


def test_held_out_questions_are_answered_right_and_with_honest_probabilities(server):
    """What its card says, on fewer questions."""
    lines = [decision_line(one) for one in questions(DECISION_FAMILIES, "heldout", 60, 0)]
    connection = client.connect(server.url, None, KEY)
    answered = decisions.ask(connection, lines, concurrency=16)
    found = decisions.scores(lines, answered)["reports"]
    assert all(found[name]["accuracy"] >= 0.95 for name in ("yesno", "level", "wide"))
    # 97 % of 200: three standard errors of 60 questions below it.
    assert found["choice"]["accuracy"] >= 0.9
    # 60 questions, nearly all of them in one bin: one that is wrong moves it by 0.017.
    assert all(found[name]["ece"] <= 0.05 for name in ("yesno", "level", "wide"))
    assert found["odds"]["odds"] <= 0.05
    assert found["all"]["agreement"] == 1
    assert all(scores["label_mass"] > 0.9 for scores in found.values())


def ask(page: Page) -> list[str]:
    """Press the button; the names and numbers of all bars, or what the page reports."""
    page.run("document.body.dataset.state = ''")
    page.click("#go")
    page.wait_until("document.body.dataset.state == 'done'")
    return page.run("[...document.querySelectorAll('.bar')].map(one => one.textContent)")


@needs_chromium
def test_questions_are_answered_with_bars(page, server):
    bars = ask(page)
    assert page.run("$('error').textContent") == ""
    names = ["yes", "no", "0 to 19", "20 to 39", "40 to 59", "60 to 79", "80 to 99"]
    assert [bar.startswith(name) for bar, name in zip(bars, names, strict=True)] == [True] * 7
    of_name = {
        name: float(bar.removeprefix(name).split(" %")[0])
        for bar, name in zip(bars, names, strict=True)
    }
    assert of_name["yes"] > 80 and of_name["20 to 39"] > 80  # Ann has 34
    told = page.run("[...document.querySelectorAll('.answer .told')].map(one => one.textContent)")
    assert len(told) == 2 and told[1].startswith("score ") and "samples 4" in told[0]
    assert page.run("document.querySelectorAll('.error').length") == 7  # of four samples
    page.take_picture()
    assert page.hosts == {f"127.0.0.1:{server.port}"} and page.errors == []


@needs_chromium
def test_a_choice_is_added_and_another_is_taken_away(page):
    page.click("#add")
    page.fill("#input", "Bob has a cat.")
    page.run(
        "document.querySelectorAll('.text')[2].value = 'What has Bob?';"
        "document.querySelectorAll('.options')[2].value = 'dog\\ncat\\n<b>hen</b>'"
    )
    page.click(".remove", 0)
    page.click(".remove", 0)
    bars = ask(page)
    names = ["dog", "cat", "<b>hen</b>"]  # what looks like markup is text
    assert all(bar.startswith(name) for bar, name in zip(bars, names, strict=True))


@needs_chromium
def test_what_the_server_refuses_is_said(page):
    page.run("document.querySelectorAll('.options')[1].value = 'alone'")
    assert ask(page) == []
    assert page.run("$('error').textContent").startswith("HTTP 400")
    page.fill("#key", "wrong")
    assert ask(page) == []
    assert page.run("$('error').textContent").startswith("HTTP 401")
