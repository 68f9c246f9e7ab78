"""Texts of grammars on canvases of masks, step by step, with random logits in place of a model.

What is checked is always the same: no canvas gets stuck, and what is emitted is a text.
"""

import functools
import itertools
import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar

from dllm.engine.algorithm import Denoised
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.grammars import HostGrammars, Written
from dllm.grammar.constraint import Constraint, SlotGrammar, Thoughts
from dllm.grammar.lowering import lower
from dllm.grammar.refusals import Unsupported
from dllm.grammar.table import Table
from dllm.grammar.viterbi import STOPPED, Canvas
from dllm.models.llada2.settings import LLaDA2Settings
from dllm.models.sdar.settings import SDARSettings
from dllm.models.unmasking.rule import STRATEGIES
from dllm.models.unmasking.step import Unmasking
from dllm.ops.filters import RowFilters
from dllm.settings.denoising import NO_TOKEN
from tests.models.test_unmasking_step import fresh_canvases
from tests.support.grammars import GRAMMARS, PADDING, STOP, WORDS, random_schema, table

MASK, VOCAB = len(WORDS), len(WORDS) + 1
SEED = "DLLM_GRAMMAR_SEED"  # of the random cases, for a campaign
# Ends thoughts, and is forbidden in them, although both could be text.
END, ALSO = WORDS.index(b"true"), WORDS.index(b"null")


def with_mask(found: Table) -> Table:
    """The table for a vocabulary with one more token, which is in no text."""
    return replace(found, class_of=np.append(found.class_of, -1).astype(np.int32))


class Asked(NamedTuple):
    """A request: how its canvases are filled in, and under which grammar."""

    family: Unmasking
    canvas: Canvas
    end: int  # the position at which the answer ends at the latest
    temperature: float | None = None  # None: greedy
    seed: int = 0
    filters: tuple[int, float, float] | None = None  # top-k, top-p, min-p
    start: int = 0  # the state in which it starts


class Step(NamedTuple):
    """A denoise step of one canvas."""

    written: Written
    canvas: list[int]
    emitted: list[int] | None


def settings_of(block_size: int, rng: random.Random) -> Any:
    """Of a random family."""
    steps, threshold = rng.randint(1, block_size), rng.choice([0.0, 0.3, 0.85, 1.0])
    common = (VOCAB, block_size, MASK, steps, threshold)
    if rng.random() < 0.5:
        return SDARSettings(*common, rng.choice(STRATEGIES), rng.choice([0.0, 0.35, 3.0]))
    editing = (rng.randint(0, 1), rng.choice([0.0, 0.1, 0.5, 0.9]), rng.randint(0, 6))
    return LLaDA2Settings(*common, *editing)


class Denoising:
    """One canvas behind ``start`` tokens of a sequence, until it has converged.

    With ``seeds``, a canvas of each, for ``denoise``.
    """

    def __init__(self, asked: Asked, state: int, start: int, seeds: Sequence[int] = ()) -> None:
        settings, seeds = asked.family.settings, seeds or [asked.seed]
        block, count = settings.block_size, len(seeds)
        self.asked, self.state, self.width = asked, state, block - start % block
        of, place = torch.arange(count), torch.arange(self.width)
        self.rows = CanvasRows(
            slots=torch.zeros_like(of),
            widths=torch.full_like(of, self.width),
            starts=torch.full_like(of, start),
            seq_lens=torch.full_like(of, start + self.width),
            request_of=of.repeat_interleave(self.width),
            place=place.repeat(count),
            padded=of[:, None] * self.width + torch.arange(block).clamp(max=self.width - 1),
        )
        self.canvases = fresh_canvases(seeds, asked.temperature, settings, self.width)
        self.canvases.is_stop[:, STOP] = True
        self.filters = None
        if asked.filters:
            top_k, top_p, min_p = (
                torch.tensor([value] * count * self.width) for value in asked.filters
            )
            self.filters = RowFilters(top_k.int(), top_p.float(), min_p.float())

    def denoise(self, logits: torch.Tensor) -> tuple[Written, Denoised]:
        """One step by the code that serves, each canvas with the logits ``[width, VOCAB]``."""
        family, rows = self.asked.family, self.rows
        slot = SlotGrammar(_Unpacked(self.asked.canvas), self.state, self.asked.end)  # type: ignore[arg-type]
        before, count = self.canvases, len(self.rows.widths)
        masked = logits.repeat(count, 1)
        # Those of all canvases at once, because a hundred single ones take far longer.
        scores = family.scores_of_texts(masked, rows, before, self.filters, slice(None))
        written = HostGrammars.write_(
            None,  # type: ignore[arg-type]
            masked,
            lambda part: scores[part],
            rows,
            [(row, row * self.width, slot) for row in range(count)],
        )
        chosen = before._replace(chosen=written.chosen)
        return written, family.denoise(masked, rows, chosen, self.filters)

    def step(self, logits: torch.Tensor) -> Step:
        """One step of the only canvas; ``logits`` are not changed."""
        written, done = self.denoise(logits)
        canvas = done.canvas[0, : self.width]
        self.canvases = self.canvases._replace(
            ids=canvas, steps_done=done.steps_done, step_state=done.step_state
        )
        emitted = done.argmax_canvas[0, : self.width].tolist() if done.converged else None
        if emitted is not None:
            self.state = int(written.paths[0].states[-1])
        return Step(written, canvas.tolist(), emitted)


class _Unpacked(NamedTuple):
    canvas: Canvas


# --- every step, against all texts of a small grammar --------------------------------------------

TOKENS = (b"a", b"b", b"ab", b"ba", b"aab")
PATTERN = rb"(ab|b)*a?"


def all_texts(width: int) -> list[list[int]]:
    """Each text that ends on a canvas, with stops from its end on."""
    return [
        [*text, *[STOP] * (width - length)]
        for length in range(width)
        for text in itertools.product(range(len(TOKENS)), repeat=length)
        if re.fullmatch(PATTERN, b"".join(TOKENS[token] for token in text))
    ]


def best_text(rows: np.ndarray, canvas: list[int], texts: list[list[int]]) -> list[int]:
    """The text through what stands on the canvas, by trying all; without its stops but the first.

    The most likely tokens win if they are a text, whatever stands behind it.
    """
    stays = np.array(canvas) != MASK
    likeliest = np.where(stays, canvas, rows.argmax(axis=1)).tolist()
    if STOP in likeliest:
        own = likeliest[: likeliest.index(STOP) + 1]
        if any(text[: len(own)] == own for text in texts):
            return own
    allowed = [text for text in texts if (np.array(text) == canvas)[stays].all()]
    free = np.flatnonzero(~stays)
    best = max(allowed, key=lambda text: rows[free, np.array(text)[free]].sum())
    return best[: best.index(STOP) + 1]


def test_every_step_writes_the_best_text_through_what_stays() -> None:
    found, _ = table("regex", PATTERN.decode())
    canvas = Canvas(with_mask(found), (STOP,))
    draws, rng = np.random.default_rng(0), random.Random(0)
    num_steps = 0
    for case in range(60):
        start = rng.randint(1, 5)
        strategy, steps = STRATEGIES[case % 4], rng.randint(1, 8)
        family = Unmasking(SDARSettings(VOCAB, 8, MASK, steps, 0.9, strategy, 0.35))
        denoising = Denoising(Asked(family, canvas, end=8), 0, start)
        texts, before, step = all_texts(8 - start), [MASK] * (8 - start), None
        while step is None or step.emitted is None:
            logits = torch.full((8 - start, VOCAB), -1e4)
            logits[:, : STOP + 1] = torch.from_numpy(draws.normal(0, 2, (8 - start, STOP + 1)))
            step = denoising.step(logits)
            expected = best_text(logits.double().numpy(), before, texts)
            chosen = step.written.chosen.tolist()
            assert chosen == [*expected, *[NO_TOKEN] * (8 - start - len(expected))]
            behind = step.canvas[len(expected) :]
            assert all(token == MASK for token in behind)
            before, num_steps = step.canvas, num_steps + 1
        assert step.emitted[: len(expected)] == expected
    assert num_steps > 100


# --- random cases, judged by xgrammar's matcher and jsonschema ------------------------------------


@functools.cache
def known_grammar(name: str) -> tuple[Table, Any, dict[str, Any] | None]:
    kind, text = GRAMMARS[name]
    if kind == "json":
        return of_schema(json.loads(text))
    return *table(kind, text, most_states=400), None


def of_schema(schema: dict[str, Any]) -> tuple[Table, Any, dict[str, Any]]:
    return *table("json", json.dumps(lower(schema).schema()), most_states=400), schema


def random_grammar(rng: random.Random) -> tuple[Table, Any, dict[str, Any] | None]:
    """(a table, xgrammar's compiled grammar, the schema if it is one)."""
    if rng.random() < 0.5:
        return known_grammar(rng.choice([*GRAMMARS]))
    while True:
        schema = random_schema(rng)
        try:
            return of_schema(schema)
        except Unsupported:
            continue


def answer(asked: Asked, prompt_len: int, draws: np.random.Generator) -> tuple[list[int], bool]:
    """(the tokens of an answer without its end, whether it has one): of random logits."""
    tokens: list[int] = []
    state, most = asked.start, asked.end - prompt_len
    scale, settings = draws.choice([0.1, 1.0, 4.0, 12.0]), asked.family.settings
    while len(tokens) < most:
        denoising = Denoising(asked, state, prompt_len + len(tokens))
        prefers = draws.integers(0, len(WORDS), denoising.width)
        for count in itertools.count(1):
            assert (
                count <= settings.max_denoising_steps + getattr(settings, "max_post_steps", 0) + 1
            )
            logits = draws.normal(0, scale, (denoising.width, VOCAB))
            if draws.random() < 0.5:  # the same text in every step, whatever the grammar says
                logits[np.arange(denoising.width), prefers] += 3 * scale
            if draws.random() < 0.3:
                logits[:, STOP] += 4 * scale * draws.normal()
            logits[:, MASK] = -np.inf
            if draws.random() < 0.2:
                logits[:, draws.integers(0, len(WORDS), 20)] = -np.inf
            step = denoising.step(torch.from_numpy(logits).float())
            chosen = step.written.chosen.tolist()
            assert (
                all(
                    token in (MASK, of_text)
                    for token, of_text in zip(step.canvas, chosen, strict=True)
                )
                or step.emitted
            )
            if step.emitted is not None:
                break
        state = denoising.state
        if state == STOPPED:
            return tokens + step.emitted[: step.emitted.index(STOP)], True
        tokens += step.emitted
    return tokens[:most], False


def without_thoughts(tokens: list[int]) -> list[int]:
    """The answer behind thoughts, which hold nothing that is forbidden."""
    end = tokens.index(END) if END in tokens else len(tokens)
    assert not {STOP, PADDING, MASK, ALSO} & {*tokens[:end]}, tokens
    return tokens[end + 1 :]


@pytest.mark.parametrize("cases", [200, 4000])
def test_random_cases_never_get_stuck_and_are_valid(cases: int) -> None:
    seed = int(os.environ.get(SEED, 0))
    rng, draws = random.Random(seed), np.random.default_rng(seed)
    complete = 0
    for _ in range(cases):
        answers, compiled, schema = random_grammar(rng)
        thoughts = Thoughts(END, (ALSO,)) if rng.random() < 0.2 else None
        constraint = Constraint(with_mask(answers), thoughts)
        found, start = constraint.with_start((STOP,), (PADDING,))
        block, shortest = rng.choice([4, 8, 16, 32]), int(found.left[start])
        room = rng.choice(
            [rng.randint(1, 6), shortest, shortest + 1, shortest + rng.randint(0, 40)]
        )
        most, prompt_len = max(1, min(room, 150)), rng.randint(1, 40)
        sampled = rng.choice([None, None, 0.5, 1.0, 2.0])
        asked = Asked(
            Unmasking(settings_of(block, rng)),
            Canvas(found, (STOP,), (PADDING,)),
            prompt_len + most,
            sampled,
            seed=rng.randrange(1 << 40),
            filters=rng.choice([None, (VOCAB, 1.0, 0.0), (5, 0.9, 0.0), (1, 1.0, 0.5)]),
            start=start,
        )
        tokens, is_over = answer(asked, prompt_len, draws)
        assert is_over or len(tokens) == most
        if thoughts is not None:
            tokens = without_thoughts(tokens)
        # xgrammar judges no schema: it has no escapes in strings with a length.
        matcher = None if schema else xgrammar.GrammarMatcher(compiled)
        assert matcher is None or all(matcher.accept_token(token) for token in tokens), tokens
        if shortest < most:
            assert is_over and (matcher is None or matcher.accept_token(STOP)), (schema, tokens)
            complete += 1
            if schema is not None:
                text = b"".join(WORDS[token] for token in tokens).decode()
                jsonschema.validate(json.loads(text), schema)
    assert complete > cases / 3


# --- samples -------------------------------------------------------------------------------------


def test_one_token_is_drawn_from_its_distribution() -> None:
    """4,000 seeds, with and without filters, beside frequencies by hand."""
    found, _ = table("ebnf", 'root ::= "a" | "b" | "ab" | "ba"')
    canvas = Canvas(with_mask(found), (STOP,))
    family = Unmasking(SDARSettings(VOCAB, 4, MASK, 1, 0.5, STRATEGIES[1], 0.35))
    logits = torch.full((2, VOCAB), -1e3)
    logits[0, :4] = torch.tensor([0.0, 0.7, -0.5, 1.5])
    logits[1, STOP] = 0.0
    for filters, kept in ((None, [0, 1, 2, 3]), ((2, 1.0, 0.0), [1, 3])):
        counts = np.zeros(4)
        asked = Asked(family, canvas, end=4, temperature=0.8, filters=filters)
        for low in range(0, 4000, 100):
            _, done = Denoising(asked, 0, 2, range(low, low + 100)).denoise(logits)
            first, second = done.argmax_canvas[:, :2].T
            assert done.converged.all() and (second == STOP).all()
            counts += np.bincount(first, minlength=4)
        probs = np.zeros(4)
        probs[kept] = np.exp(logits[0, kept].double().numpy() / 0.8)
        probs /= probs.sum()
        deviation = np.sqrt(probs * (1 - probs) / 4000)
        # Each of six frequencies is off by five deviations once in a million runs.
        assert (np.abs(counts / 4000 - probs) <= 5 * deviation).all(), (counts, probs)
