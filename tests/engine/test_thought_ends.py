"""engine/thoughts.py beside a loop that reads from left to right."""

import random
from collections.abc import Sequence

import torch
from vllm import SamplingParams

from dllm.engine.thoughts import ABSENT, Thought, Thoughts
from dllm.grammar.constraint import Constraint
from dllm.grammar.constraint import Thoughts as InFront
from dllm.grammar.table import Table
from dllm.settings.request import with_grammar
from dllm.settings.thoughts import NO_MARK, Marks
from tests.support.watched_device import DeviceWatch, on_device

START, END, CALL, MASK, AT = 7, 8, 9, 99, 100  # AT: where canvases start
MARKS = Marks(START, END, CALL)


def of(begin: int, budget: int) -> Thoughts:
    given = (torch.tensor([x]) for x in (begin, budget, *MARKS, AT))
    return Thoughts(*given, is_asked=torch.tensor(True))


def read(tokens: Sequence[int], begin: int, budget: int) -> tuple[list[bool], list[int], int]:
    """(where an end is held, the tokens with it, where the thought behind them begins)."""
    held, text = [], []
    for place, token in enumerate(tokens, AT):
        held.append(begin != ABSENT and budget >= 0 and place - begin >= budget)
        text.append(END if held[-1] else token)
        if text[-1] == START:
            begin = place + 1
        elif text[-1] in (END, CALL):
            begin = ABSENT
    return held, text, begin


def drawn(draw: random.Random) -> list[int]:
    """Many marks, one behind the other."""
    some = draw.choice(([1, START], [START, END], [1, 1, START, END, CALL, MASK]))
    return draw.choices(some, k=draw.choice((1, 2, 5, 16)))


def test_ends_are_held_where_a_reader_finds_a_full_thought():
    draw = random.Random(1)
    for _ in range(5000):
        tokens, begin = drawn(draw), draw.choice((ABSENT, AT, AT - 1, AT - 5))
        budget = draw.choice((-1, 0, 0, 1, 2, 5))
        held, text, behind = read(tokens, begin, budget)
        thoughts = of(begin, budget)
        for find in (thoughts.ends_at, thoughts.searched_ends):
            assert find(torch.tensor([tokens]))[0].tolist() == held, (tokens, begin, budget)
        count = draw.randint(0, len(text))
        found = thoughts.behind(torch.tensor([text]), torch.tensor([count]))
        assert int(found.begin) == read(text[:count], begin, -1)[2]
        assert int(found.canvas_start) == AT + count
        if count == len(text):
            assert int(found.begin) == behind


def test_no_end_is_searched_where_nobody_has_a_budget(monkeypatch):
    """The host knows, and does not wait for the device."""
    monkeypatch.setattr(Thoughts, "searched_ends", None)
    thoughts = of(AT, -1)._replace(is_asked=torch.tensor(False))
    with DeviceWatch() as watch:
        given = [on_device(field) for field in thoughts[:-1]]
        on_gpu = Thoughts(*given, is_asked=thoughts.is_asked)
        found = on_gpu.ends_at(on_device(torch.tensor([[1, START, 1]])))
    assert not found.any() and not watch.findings


def test_an_end_that_was_held_in_vain_goes():
    thoughts = of(AT, 3)
    before = torch.tensor([[MASK, MASK, MASK, END, MASK]])
    earlier = torch.tensor([[1, END, MASK, END, MASK]])
    assert thoughts.moved(before, earlier, MASK).tolist() == [[1, END, MASK, MASK, MASK]]
    later = torch.tensor([[1, 2, MASK, 5, MASK]])
    assert thoughts.moved(before, later, MASK).tolist() == [[1, 2, MASK, END, MASK]]
    own = torch.tensor([[1, END, MASK, MASK, END]])  # where none was held
    assert thoughts.moved(before, own, MASK).tolist() == own.tolist()


def test_a_request_is_read_as_its_canvases_are():
    """A prompt, what was emitted before a preemption, and how many thoughts were full."""
    draw, params = random.Random(2), SamplingParams(thinking_token_budget=2)
    for _ in range(500):
        prompt, answer = drawn(draw), drawn(draw)
        thought = Thought.of_request(params, prompt, MARKS)
        assert thought is not None
        begin = read(prompt, ABSENT, -1)[2]
        assert thought.begin == (begin if begin == ABSENT else begin - AT)
        thought.begin = begin
        held, text, behind = read(answer, begin, 2)
        assert thought.read(text, AT) == sum(held)
        assert thought.begin == behind


def test_under_a_grammar_all_in_front_of_the_answer_is_one_thought():
    params = SamplingParams(thinking_token_budget=4)
    table = Table.of_any_text(64).to_bytes()
    behind = with_grammar(params, Constraint.serialize(table, InFront(END)))
    for prompt, end_by in (([1, START, 5], 6), ([1, 2], 6), ([START, END], 6)):
        thought = Thought.of_request(behind, prompt, MARKS)
        assert thought is not None and thought.end_by == end_by
        assert thought.marks == Marks(NO_MARK, END, CALL)
    at_once = with_grammar(params, Constraint.serialize(table, None))
    assert Thought.of_request(at_once, [1, START], MARKS) is None
    assert Thought.of_request(SamplingParams(), [1, START], MARKS) is None
