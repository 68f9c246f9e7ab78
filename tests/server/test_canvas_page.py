"""The page /canvas in a real browser, in front of the bundled model; and what it stands on."""

import itertools
import json
from collections.abc import Iterator
from random import Random

import openai
import pytest
from transformers import AutoTokenizer

from bench.toys.suite import FAMILIES, Question, questions
from tests.support.chat_stub import Stub, serve
from tests.support.chromium import PAGES, Page, needs_chromium
from tests.support.patience import HANG_S
from tests.support.server_harness import CHECKPOINTS, Server, serving

CHECKPOINT = CHECKPOINTS / "tiny-dllm"
FLAGS = ("--enforce-eager", "--max-model-len=512", "--max-num-seqs=32", "--api-key=secret")
JSON_QUESTION = "Write name, age and city as JSON: Lou is 28 and lives in Baku."

pytest_plugins = ["tests.support.chromium"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serving(CHECKPOINT, tmp_path_factory, FLAGS, PAGES)


@pytest.fixture
def page(browser: Page, server: Server) -> Page:
    browser.open(f"{server.url}/canvas")
    browser.fill("#key", "secret")
    return browser


def finish(page: Page, button: str) -> str:
    """Press a button that denoises; the answer when it is done."""
    page.run("document.body.dataset.state = ''")
    page.click(button)
    page.wait_until("document.body.dataset.state == 'done'")
    assert page.run("$('error').textContent") == ""
    return str(page.run("$('heat').textContent"))


def tokens(page: Page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll('{selector}')].map(one => one.textContent)")


@needs_chromium
def test_a_wrong_key_is_refused_and_a_right_one_is_not(page):
    page.fill("#key", "wrong")
    page.click("#go")
    assert "401" in page.wait_until("$('error').textContent")
    assert page.run("frames.length") == 0
    page.fill("#key", "secret")
    assert "Bob" in finish(page, "#go")
    assert page.run("$('error').textContent") == ""


@needs_chromium
def test_tokens_settle_and_can_be_watched_again(page, server):
    asked = next(
        next(problem)
        for problem in (FAMILIES["prose"](Random(seed)) for seed in itertools.count())
        if next(problem) == ("thank", "Ann", "Bob", "map")
    )
    page.fill("#prompt", asked.prompt)
    answer = finish(page, "#go")
    assert answer.endswith("<eos>") and answer.removesuffix("<eos>") in asked.accepted
    num_frames = page.run("frames.length")
    assert num_frames > 3
    assert page.run("$('status').textContent").startswith(f"1 block, steps {num_frames}, ")
    assert len(tokens(page, "#canvas .final")) == page.run("frames.count")
    settled = tokens(page, "#canvas .cell")
    page.run("$('replay').value = 0; $('replay').oninput()")
    assert tokens(page, "#canvas .noise") and not tokens(page, "#canvas .final")
    assert tokens(page, "#canvas .cell") != settled
    page.run("$('replay').value = 2; $('replay').oninput()")
    page.take_picture()
    page.click("#play")
    page.wait_until(
        "$('replay').value == frames.length - 1 && !document.querySelector('#canvas .noise')"
    )
    assert tokens(page, "#canvas .cell") == settled
    assert page.hosts == {f"127.0.0.1:{server.port}"} and page.errors == []


@needs_chromium
def test_tokens_are_pinned_by_clicks_and_the_rest_is_written_again(page):
    page.fill("#prompt", JSON_QUESTION)
    answer = finish(page, "#go")
    assert answer == '{"name": "Lou", "age": 28, "city": "Baku"}<eos>'
    places = [i for i, token in enumerate(tokens(page, "#canvas .cell")) if token in ("2", "8")]
    for place in places:
        page.click("#canvas .cell", place)
    assert tokens(page, "#canvas .pinned") == ["2", "8"]
    page.click("#canvas .cell", places[0])  # and off again
    assert tokens(page, "#canvas .pinned") == ["8"]
    page.fill("#prompt", JSON_QUESTION.replace("28", "35"))
    assert '"age": 38' in finish(page, "#again")
    assert tokens(page, "#canvas .pinned") == ["8"]


@needs_chromium
def test_a_correction_is_typed_and_everything_works_by_keyboard(page):
    page.fill("#prompt", JSON_QUESTION)
    finish(page, "#go")
    place = tokens(page, "#canvas .cell").index("Lou")
    page.run("document.querySelector('#canvas .cell').focus()")
    for _ in range(place):
        page.press("ArrowRight")
    page.type("Tom")  # the first letter opens the field
    assert page.run("$('text').value") == "Tom"
    page.press("Enter")
    page.press("ArrowRight")
    page.press("Enter")  # pins the token behind it
    pins = json.loads(page.run("JSON.stringify(asSent(pins))"))
    assert pins[0] == {"at": place, "text": "Tom"} and pins[1]["at"] == place + 1
    page.press("Delete")
    assert page.run("pins.size") == 1
    assert finish(page, "#again") == '{"name": "Tom", "age": 28, "city": "Baku"}<eos>'


@needs_chromium
def test_only_what_is_uncertain_is_written_again(page):
    page.fill("#prompt", "Thank Ann for the map, from Bob.")
    finish(page, "#go")
    page.run("$('limit').value = 0.000001")
    page.run("frames.at(-1).entropy[3] = 900")
    before = page.run("JSON.stringify(answer().filter(one => one.entropy == 0).map(one => one.id))")
    given = json.loads(page.run("JSON.stringify([...uncertain()])"))
    assert 3 not in [at for at, _ in given] and len(given) > 5
    finish(page, "#doubt")
    after = page.run(
        f"JSON.stringify({json.dumps([at for at, _ in given])}.map(at => tokenAt(at).id))"
    )
    assert after == before


@needs_chromium
def test_a_refused_request_leaves_the_answer(page):
    answer = finish(page, "#go")
    page.run("$('tokens').value = 4")
    page.click("#canvas .cell", 6)  # a held pin behind max_tokens
    page.click("#again")
    page.wait_until("$('error').textContent")
    assert "max_tokens of at least 7" in page.run("$('error').textContent")
    assert page.run("answer().map(one => one.token).join('')") == answer


@needs_chromium
def test_hostile_text_is_text(page):
    finish(page, "#go")
    page.run(
        "frames.at(-1).tokens[0] = '<img src=x onerror=window.owned=1>';"
        "frames.at(-1).tokens[1] = '\\u202e<script>window.owned=1</script>\\u0000'; draw()"
    )
    assert tokens(page, "#canvas .cell")[:2] == [
        "<img·src=x·onerror=window.owned=1>",
        "�<script>window.owned=1</script>�",
    ]
    assert page.run("document.querySelectorAll('#canvas img, #heat img, #heat script').length") == 0
    page.run(
        "(() => { const s = document.createElement('script');"
        " try { s.textContent = 'window.owned = 1'; document.body.append(s); } catch { } })()"
    )
    refused = page.run("fetch('http://127.0.0.1:1/').then(() => false, () => true)")
    assert refused and page.run("window.owned") is None


@needs_chromium
def test_a_twin_writes_beside_it(browser, server):
    with serve(Stub(lambda messages: f"You said: {messages[0]['content']}")) as twin:
        port = twin.url.rpartition(":")[2].rstrip("/")
        browser.open(f"{server.url}/canvas?twin={port}")
        browser.fill("#key", "secret")
        assert "Bob" in finish(browser, "#go")
        assert browser.run("$('twintext').textContent").startswith("You said: Thank Ann")
        assert "one by one" in browser.run("$('twinstatus').textContent")
        assert twin.requests[0]["messages"][0]["role"] == "user"
        assert "vllm_xargs" not in twin.requests[0]


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_needs_no_sideways_scrolling(page, scheme):
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    page.command("Emulation.setEmulatedMedia", features=media)
    page.command(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=700,
        deviceScaleFactor=1,
        mobile=True,
    )
    try:
        finish(page, "#go")
        page.click("#canvas .cell", 3)
        width = page.run("document.documentElement.scrollWidth")
        background = page.run("getComputedStyle(document.body).backgroundColor")
    finally:
        page.command("Emulation.clearDeviceMetricsOverride")
        page.command("Emulation.setEmulatedMedia", features=[])
    assert width == 360
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(13, 17, 23)")


# --- holes of held-out answers --------------------------------------------------------------------

TEMPLATE = "<bos><|turn>user\n{}<turn|>\n<|turn>model\n"


def middle(ids: list[int]) -> tuple[int, int]:
    """Where the middle third of an answer begins and ends."""
    return len(ids) // 3, len(ids) - max(2, len(ids) // 3)


def test_holes_of_held_out_answers_are_filled(server):
    """At least 95% have the true width, and as many are right answers; the suffix always stays."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", timeout=HANG_S)
    num_widths = num_right = 0
    cases: list[tuple[Question, list[int]]] = []
    for question in questions(FAMILIES, "heldout", 6):
        ids = tokenizer.encode(question.answer, add_special_tokens=False)
        if 6 <= len(ids) <= 28:
            cases.append((question, ids))
    for seed, (question, ids) in enumerate(cases):
        start, end = middle(ids)
        prefix, suffix = tokenizer.decode(ids[:start]), tokenizer.decode(ids[end:])
        completion = client.completions.create(
            model=str(CHECKPOINT),
            prompt=TEMPLATE.format(question.prompt) + prefix,
            suffix=suffix,
            max_tokens=16,
            seed=seed,
            extra_body={"add_special_tokens": False},
        )
        num_widths += completion.usage.completion_tokens == end - start
        num_right += question.is_correct(prefix + completion.choices[0].text + suffix)
    assert len(cases) > 35
    assert num_widths >= 0.95 * len(cases), (num_widths, len(cases))
    assert num_right >= 0.95 * len(cases), (num_right, len(cases))
