"""The best path is the best of all texts, complete if it can be, and always a text's beginning."""

import itertools
import json
import os
import random

import jsonschema
import numpy as np
import pytest
import xgrammar

from dllm.grammar import viterbi
from dllm.grammar.automaton import DEAD
from dllm.grammar.lowering import lower
from dllm.grammar.refusals import Unsupported
from dllm.grammar.table import Table
from dllm.grammar.viterbi import OTHER_THAN_FIXED, STOPPED, Canvas, Path, budget_of
from tests.support.grammars import (
    GRAMMARS,
    PADDING,
    STOP,
    WORDS,
    build,
    compiler,
    random_schema,
    read,
    spelled,
    table,
)

STOPS = (STOP,)
# How many random schemas, and which: more of them for a campaign.
CASES, SEED = "DLLM_GRAMMAR_CASES", "DLLM_GRAMMAR_SEED"
SHORT = ("words", "optional", "counted")


def of_all_texts(found: Table, scores: np.ndarray, budget: int) -> float:
    """The best score, by trying all texts of the first five tokens."""
    relative = scores - scores.max(axis=1, keepdims=True)
    best = -np.inf
    for length in range(len(scores) + 1):
        for text in itertools.product(range(5), repeat=length):
            state, score, is_allowed = 0, 0.0, True
            for place, token in enumerate(text):
                state = found.read(state, [token])
                is_allowed = state != DEAD and found.left[state] <= budget - place - 1
                if not is_allowed:
                    break
                score += relative[place, token]
            if is_allowed and (length == len(scores) or found.accepts[state]):
                best = max(best, score + relative[length:, STOP].sum())
    return best


@pytest.mark.parametrize("column", [1, viterbi.COLUMN])
@pytest.mark.parametrize("name", SHORT)
def test_it_is_the_best_of_all_texts(name, column, monkeypatch):
    monkeypatch.setattr(viterbi, "COLUMN", column)
    monkeypatch.setattr(viterbi, "AT_ONCE", column)  # rows one by one, or some at once
    rng = np.random.default_rng(0)
    found, _ = table(*GRAMMARS[name])
    num_unchanged = 0
    for _ in range(40):
        width, tokens_left = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        scores = np.full((width, len(WORDS)), -1e4)
        scores[:, :STOP] = rng.normal(0, 3, (width, STOP))
        scores[:, STOP] = rng.normal(0, 3, width)
        budget = budget_of(found, 0, tokens_left)
        path = Canvas(found, STOPS).best_path(scores, 0, budget)
        expected = of_all_texts(found, scores, budget)
        if (path.tokens == scores.argmax(axis=1)).all():
            num_unchanged += 1  # what stands behind a stop need not be stops
            assert path.score == 0.0
        else:
            assert path.score == pytest.approx(expected, abs=1e-6)
        check(found, path, budget)
    assert num_unchanged < 30


def check(found: Table, path: Path, budget: int) -> None:
    """The path's states are those of its tokens, and each may be entered."""
    canvas = Canvas(found, STOPS)
    assert canvas.read(path.tokens.tolist(), int(path.states[0]), budget) == (
        path.states.tolist(),
        len(path.tokens),
    )
    forbidden = np.stack(canvas.forbidden(path, budget))
    for place, token in enumerate(path.tokens.tolist()):
        before, behind = path.states[place], path.states[place + 1]
        assert not forbidden[place, token]
        if before == STOPPED:
            assert behind == STOPPED and not forbidden[place].any()
        elif behind == STOPPED:
            assert token == STOP and found.accepts[before]
        else:
            assert found.read(before, [token]) == behind
            assert found.left[behind] <= budget - place - 1


@pytest.mark.parametrize("name", SHORT)
def test_through_fixed_tokens_it_is_the_best_of_their_texts(name):
    """By brute force; what is impossible stays better than another token than a fixed one."""
    rng = np.random.default_rng(1)
    found, _ = table(*GRAMMARS[name])
    canvas = Canvas(found, STOPS)
    searched = 0
    for _ in range(60):
        width = int(rng.integers(2, 6))
        budget = budget_of(found, 0, width)  # the text ends on the canvas
        free = np.full((width, len(WORDS)), -np.inf)
        free[:, : STOP + 1] = rng.normal(0, 3, (width, STOP + 1))
        free[rng.random(free.shape) < 0.1] = -np.inf
        other = np.where(np.arange(len(WORDS)) > STOP, -1e4, rng.normal(0, 3, free.shape))
        wanted = canvas.best_path(other, 0, budget)
        end = int(np.flatnonzero(wanted.states == STOPPED)[0])
        wanted.tokens[end:] = STOP
        fixed = np.flatnonzero(rng.random(width) < 0.4)
        scores = free.copy()
        scores[fixed] = OTHER_THAN_FIXED
        scores[fixed, wanted.tokens[fixed]] = 0.0
        path = canvas.best_path(scores, 0, budget)
        assert path.score > OTHER_THAN_FIXED / 2
        if path.score == 0.0:
            continue  # the most likely tokens are a text already; behind its stop anything goes
        searched += 1
        assert (path.tokens == wanted.tokens)[fixed].all()
        finite = np.maximum(np.nan_to_num(scores, neginf=-1e30), -1e33)
        assert path.score == pytest.approx(of_all_texts(found, finite, budget), rel=1e-9)
    assert searched > 20


def by_classes(found: Table, scores: np.ndarray, budget: int) -> tuple[list[int], float]:
    """(tokens, score) of the best path over all classes and states, that ends nowhere.

    Among equals the lowest state, then the lowest class, then the lowest token.
    """
    relative = scores - scores.max(axis=1, keepdims=True)
    order, starts = found.members
    tokens = np.split(order, starts[1:])
    weights = np.stack([relative[:, some].max(axis=1) for some in tokens], axis=1)
    at = [np.where(np.arange(len(found.accepts)) == 0, 0.0, -np.inf)]
    for place, weight in enumerate(weights):
        through = np.where(found.next >= 0, at[-1][:, None] + weight, -np.inf)
        behind = np.full(len(found.accepts), -np.inf)
        np.maximum.at(behind, found.next, through)
        behind[found.left > budget - place - 1] = -np.inf
        at.append(behind)
    state, path = int(at[-1].argmax()), []
    for place in reversed(range(len(scores))):
        through = at[place][:, None] + weights[place]
        before = np.argwhere((found.next == state) & (through == at[place + 1][state]))[0]
        some = tokens[before[1]]
        path.append(int(some[scores[place, some].argmax()]))
        state = int(before[0])
    return path[::-1], float(at[-1].max())


@pytest.mark.parametrize("name", ["person", "short text", "list", "words"])
def test_labels_find_the_path_that_classes_find(name):
    """Also among equals: half of the scores are whole numbers."""
    rng = np.random.default_rng(0)
    found, _ = table(*GRAMMARS[name], most_states=300)
    for trial in range(8):
        scores = rng.normal(0, 3, (int(rng.integers(2, 20)), len(WORDS))).astype(np.float32)
        scores = scores.round() if trial % 2 else scores
        scores[:, [STOP, PADDING]] = -1e9
        budget = int(found.left[0]) + 30
        path = Canvas(found, STOPS).best_path(scores, 0, budget)
        assert (path.tokens.tolist(), path.score) == by_classes(found, scores, budget)


def test_what_a_state_forbids_is_made_once():
    canvas = Canvas(table("regex", "[a-z]*")[0], [STOP])
    path = canvas.best_path(np.zeros((5, len(WORDS)), np.float32), 0, 99)
    rows = canvas.forbidden(path, 99)
    assert len(set(path.states.tolist())) < len(rows) == 5
    by_state = dict(zip(path.states[:-1].tolist(), rows, strict=True))
    assert all(
        row is by_state[state] for state, row in zip(path.states[:-1].tolist(), rows, strict=True)
    )


def test_what_is_a_text_already_stays():
    found, _ = table(*GRAMMARS["person"])
    tokens = spelled('{"name": "ab", "age": 12}')
    scores = np.random.default_rng(2).normal(0, 1, (30, len(WORDS)))
    scores[np.arange(len(tokens)), tokens] += 50
    scores[len(tokens) :, STOP] += 50
    path = Canvas(found, STOPS).best_path(scores, 0, 30)
    assert path.score == 0.0
    np.testing.assert_array_equal(path.tokens, scores.argmax(axis=1))


def test_there_is_room_for_the_stop_if_the_text_can_be_shorter():
    """A complete text that fills the whole budget would look as if it had been cut."""
    found, _ = table("regex", "a{3,9}")
    scores = np.zeros((9, len(WORDS)))
    scores[:, WORDS.index(b"a")] = 5
    for tokens_left, stops in ((9, True), (4, True), (3, False), (2, False)):
        path = Canvas(found, STOPS).best_path(
            scores[:tokens_left], 0, budget_of(found, 0, tokens_left)
        )
        assert bool(path.states[-1] == STOPPED) is stops, tokens_left


def test_the_only_text_may_be_empty():
    found, _ = table("regex", "")
    assert not len(found.edges.source)
    path = Canvas(found, STOPS).best_path(np.zeros((3, len(WORDS))), 0, 3)
    assert path.tokens[0] == STOP and (path.states[1:] == STOPPED).all()


def test_padding_behind_the_end_costs_nothing():
    found, _ = table(*GRAMMARS["choice"])
    scores = np.zeros((8, len(WORDS)))
    scores[:, PADDING] = 9.0
    stop_only = Canvas(found, STOPS).best_path(scores, 0, 8)
    padded = Canvas(found, STOPS, (PADDING,)).best_path(scores, 0, 8)
    assert padded.score > stop_only.score
    assert (padded.tokens[4:] == PADDING).all()


# --- whole answers of several canvases, by xgrammar's matcher and jsonschema ----------------------


def generate(found: Table, rng: random.Random, draws: np.random.Generator, most: int):
    """(tokens, whether it stopped): canvases of random scores, one behind the other."""
    width = rng.choice([1, 3, 8, 32])
    state, tokens_left, tokens = 0, most, []
    while tokens_left > 0:
        places = min(width, tokens_left)
        scores = draws.normal(0, rng.choice([0.1, 3, 30]), (places, len(WORDS)))
        if rng.random() < 0.3:
            scores[:, STOP] += 20
        budget = budget_of(found, state, tokens_left)
        path = Canvas(found, STOPS).best_path(scores, state, budget)
        check(found, path, budget)
        for place, token in enumerate(path.tokens.tolist()):
            if path.states[place + 1] == STOPPED:
                return tokens, True
            tokens.append(token)
        state = int(path.states[-1])
        tokens_left -= places
    return tokens, bool(found.accepts[state])


def test_random_schemas_are_complete_wherever_the_budget_allows_it():
    seed, count = int(os.environ.get(SEED, 0)), int(os.environ.get(CASES, 150))
    rng, draws = random.Random(seed), np.random.default_rng(seed)
    complete = cut_short = 0
    for _ in range(count):
        schema = {
            "type": "object",
            "properties": {"v": random_schema(rng)},
            "required": ["v"],
            "additionalProperties": False,
        }
        compiled = compiler().compile_json_schema(json.dumps(schema), any_whitespace=False)
        try:
            made = read("json", json.dumps(lower(schema).schema()))
            found = build(made, most_states=rng.choice([300, 4096]))
        except Unsupported as reason:
            assert "states" in str(reason)
            continue
        for _ in range(2):
            most = rng.randint(1, 60)
            tokens, is_over = generate(found, rng, draws, most)
            text = b"".join(WORDS[token] for token in tokens)
            if b"\\" not in text:  # xgrammar's strings of a given length have no escapes
                matcher = xgrammar.GrammarMatcher(compiled)
                assert all(matcher.accept_token(token) for token in tokens), (schema, tokens)
            assert is_over or len(tokens) == most
            if found.left[0] <= most:
                assert is_over, (schema, tokens)
                jsonschema.validate(json.loads(text), schema)
                complete += 1
            else:
                cut_short += 1
    assert complete > count / 2 and cut_short > count / 8


def test_a_table_that_was_cut_holds_texts_of_the_grammar():
    found, compiled = table(*GRAMMARS["list"], most_states=12)
    assert len(found.accepts) <= 12
    for depth in range(1, 5):
        text = spelled("[" * depth + "a" + "]" * depth)
        assert (found.read(0, text) != DEAD) == (depth <= 2)
    rng, draws = random.Random(3), np.random.default_rng(3)
    for _ in range(20):
        tokens, is_over = generate(found, rng, draws, 30)
        matcher = xgrammar.GrammarMatcher(compiled)
        assert is_over and all(matcher.accept_token(token) for token in tokens)
