"""Logit edits on canvas rows, against the same rules written for one row in plain Python."""

from types import SimpleNamespace

import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip  (lets vLLM's states be made on a CPU)

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.states import RequestState

import dllm
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.edits import LogitEdits
from dllm.patches.cpu import register_cpu_kernels
from tests.support.naive_edits import UNKNOWN, edited, first_bad_word

VOCAB, CANVAS, SLOTS, MAX_LEN = 40, 8, 5, 64
STOPS = (1, 6)


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels() -> None:
    dllm.register()
    register_cpu_kernels()


class Batch:
    """Canvases of requests that have emitted something already, and the logits of their rows.

    The k-th request sits in slot ``SLOTS - 1 - k``, so that rows and slots differ.
    """

    def __init__(
        self,
        params: list[SamplingParams],
        seed: int,
        outputs: list[int],
        widths: list[int],
        steps_done: int = 1,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.params, self.widths = params, widths
        self.slots = [SLOTS - 1 - k for k in range(len(params))]
        self.prompts = [rng.integers(0, VOCAB, 5).tolist() for _ in params]
        self.outputs = [rng.integers(0, VOCAB, count).tolist() for count in outputs]
        self.states = RequestState(SLOTS, MAX_LEN, MAX_LEN, CANVAS, VOCAB, torch.device("cpu"))
        self.edits = self._edits()
        self.argmax = torch.from_numpy(rng.integers(0, VOCAB, (len(params), CANVAS)))
        self.logits = torch.from_numpy(rng.normal(0, 4, (sum(widths), VOCAB))).float()
        self.canvases = SimpleNamespace(
            steps_done=torch.full((SLOTS,), steps_done),
            argmax_canvas=torch.zeros(SLOTS, CANVAS, dtype=torch.int64),
        )
        self.canvases.argmax_canvas[self.slots] = self.argmax
        self.input_batch = self._input_batch()
        self.rows = CanvasRows.of_batch(self.input_batch, CANVAS, spare_slot=SLOTS - 1)

    def _edits(self) -> LogitEdits:
        req_states = LogitsProcRequestState.from_request_state(self.states)
        states = [cls(None, req_states) for cls in (LogitBiasState, PenaltiesState, BadWordsState)]
        edits = LogitEdits(states, SLOTS)
        for k, params in enumerate(self.params):
            tokens = self.prompts[k] + self.outputs[k]
            # As after a preemption: what was emitted comes back as part of the prefill.
            self.states.free_indices.append(self.slots[k])
            self.states.add_request(str(k), len(self.prompts[k]), tokens, 0, MAX_LEN)
            edits.add_request(self.slots[k], params)
        self.states.apply_staged_writes()
        edits.apply_staged_writes()
        return edits

    @property
    def starts(self) -> np.ndarray:
        """Where each canvas starts in its sequence."""
        return np.array([len(p) + len(o) for p, o in zip(self.prompts, self.outputs, strict=True)])

    @property
    def request_of(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.widths)), self.widths)

    @property
    def place(self) -> np.ndarray:
        return np.concatenate([np.arange(width) for width in self.widths])

    def _input_batch(self) -> SimpleNamespace:
        num_rows = len(self.logits)
        return SimpleNamespace(
            num_reqs=len(self.slots),
            idx_mapping=torch.tensor(self.slots),
            idx_mapping_np=np.array(self.slots),
            expanded_idx_mapping=torch.tensor(self.slots)[self.request_of],
            expanded_local_pos=torch.from_numpy(self.place).int(),
            # A causal span in front of the first canvas: logits rows are not token rows.
            positions=torch.cat([torch.zeros(3).long(), self._positions()]),
            logits_indices=torch.arange(3, 3 + num_rows),
            seq_lens=torch.from_numpy(self.starts + self.widths),
            num_draft_tokens_per_req=np.array(self.widths),
            seq_lens_cpu_upper_bound=torch.from_numpy(self.starts + CANVAS),
            cu_num_logits_np=np.cumsum([0, *self.widths]),
        )

    def _positions(self) -> Tensor:
        return torch.from_numpy(self.starts[self.request_of] + self.place)

    def edit(self, logits: Tensor | None = None) -> Tensor:
        """What the edits make of the logits, which are changed in place."""
        logits = self.logits.clone() if logits is None else logits
        prepared = self.edits.prepare(self.input_batch, self.rows, self.canvases, None)
        assert self.edits.apply_(logits, self.rows, self.canvases, prepared) is logits
        return logits

    def clean_lengths(self, logits: Tensor, argmax: Tensor) -> list[int]:
        """How many tokens of each canvas are emitted if all canvases have converged."""
        prepared = self.edits.prepare(self.input_batch, self.rows, self.canvases, None)
        assert prepared is not None and prepared.forbids_words is not None
        trimmed, clean = self.edits.trim_(logits, self.rows.widths, argmax, self.rows, prepared)
        assert trimmed is logits
        return clean.tolist()[: len(self.slots)]

    def expected(self, has_past: bool = True) -> Tensor:
        """The same, row by row."""
        rows = []
        for n, (k, p) in enumerate(zip(self.request_of, self.place, strict=True)):
            canvas = self.argmax[k, :p].tolist() if has_past else [UNKNOWN] * p
            output = self.outputs[k] + canvas
            rows.append(edited(self.logits[n], self.params[k], self.prompts[k], output, STOPS))
        return torch.stack(rows)


def params(bad_words: list[list[int]] | None = None, **options) -> SamplingParams:
    """A request with its stop tokens and bad words as ids."""
    result = SamplingParams(max_tokens=200, **options)
    result._all_stop_token_ids = set(STOPS)
    result._bad_words_token_ids = bad_words
    return result


def random_words(rng: np.random.Generator, canvas: list[int]) -> list[list[int]]:
    """Words of one to four tokens, some of which begin in that canvas."""
    words = [rng.integers(0, VOCAB, length).tolist() for length in (1, 2, 3, 4)]
    for length in (1, 2, 3):
        for start in range(len(canvas) - length):
            words.append([*canvas[start : start + length], int(rng.integers(0, VOCAB))])
    return words


CASES = {
    "nothing": params(),
    "logit_bias": params(logit_bias={3: 5.0, 7: -100.0, 0: 0.5}),
    "allowed_token_ids": params(allowed_token_ids=[2, 39, 4]),
    "min_tokens": params(min_tokens=13),
    "min_tokens is over": params(min_tokens=3),
    "repetition_penalty": params(repetition_penalty=1.7),
    "a repetition bonus": params(repetition_penalty=0.6),
    "presence_penalty": params(presence_penalty=1.5),
    "frequency_penalty": params(frequency_penalty=-0.8),
    "bad_words": params(bad_words=[[3], [5, 6], [7, 8, 9]]),
    "all": params(
        logit_bias={3: 5.0, 7: -100.0},
        allowed_token_ids=list(range(30)),
        min_tokens=12,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        bad_words=[[3], [5, 6], [7, 8, 9]],
    ),
}


@pytest.mark.parametrize("has_past", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_each_edit_on_a_canvas_of_its_own(name, has_past):
    batch = Batch([CASES[name]], seed=1, outputs=[6], widths=[8], steps_done=int(has_past))
    torch.testing.assert_close(batch.edit(), batch.expected(has_past), rtol=1e-6, atol=1e-6)
    assert torch.equal(batch.edit(), batch.logits) == (name in ("nothing", "min_tokens is over"))


@pytest.mark.parametrize("seed", range(20))
def test_random_edits_of_several_requests_in_one_batch(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 5))
    chosen = [list(CASES.values())[i] for i in rng.integers(0, len(CASES), count)]
    widths = rng.integers(0, CANVAS + 1, count).tolist()
    outputs = rng.integers(0, 20, count).tolist()
    batch = Batch(chosen, seed, outputs, widths)
    # Words that the canvas and what is in front of it begin.
    for k, (request, output) in enumerate(zip(chosen, batch.outputs, strict=True)):
        if request.bad_words_token_ids:
            words = random_words(rng, output[-3:] + batch.argmax[k].tolist())
            batch.params[k] = params(bad_words=words, frequency_penalty=0.1)
    batch.edits = batch._edits()
    torch.testing.assert_close(batch.edit(), batch.expected(), rtol=1e-6, atol=1e-6)


def test_a_slot_forgets_its_last_request():
    """Every edit is off for a new request that asks for none."""
    batch = Batch([CASES["all"]], seed=3, outputs=[4], widths=[8])
    assert not torch.equal(batch.edit(), batch.logits)
    batch.edits.add_request(batch.slots[0], params())
    batch.edits.apply_staged_writes()
    assert torch.equal(batch.edit(), batch.logits)
    assert batch.edits.prepare(batch.input_batch, batch.rows, batch.canvases, None) is None


def test_the_prompt_is_no_output():
    """Only the repetition penalty looks at it."""
    batch = Batch([params(presence_penalty=2.0)], seed=4, outputs=[0], widths=[1], steps_done=0)
    assert torch.equal(batch.edit(), batch.logits)
    prompt = batch.prompts[0]
    words = [[prompt[-1], token] for token in range(VOCAB)]
    batch.edits.add_request(batch.slots[0], params(bad_words=words))
    batch.edits.apply_staged_writes()
    assert torch.equal(batch.edit(), batch.logits)


# --- bad words at emission -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_what_comes_before_the_first_bad_word(seed):
    """Random canvases over a few tokens, so that words are completed everywhere."""
    rng = np.random.default_rng(seed)
    words = [rng.integers(0, 3, length).tolist() for length in (2, 3, 4)]
    widths = [int(rng.integers(1, CANVAS + 1)), CANVAS, 0]
    batch = Batch([params(bad_words=words), params(), params()], seed, [5, 5, 5], widths)
    batch.outputs[0] = rng.integers(0, 3, 5).tolist()
    batch.edits = batch._edits()
    argmax = torch.from_numpy(rng.integers(0, 3, batch.argmax.shape))
    # Position 0 was edited behind committed tokens, so it never completes a word.
    while first_bad_word(words, batch.outputs[0] + [int(argmax[0, 0])], 5) is not None:
        argmax[0, 0] = (argmax[0, 0] + 1) % VOCAB
    output = batch.outputs[0] + argmax[0, : widths[0]].tolist()
    first = first_bad_word(words, output, 5)
    expected = widths[0] if first is None else first - 5
    lengths = batch.clean_lengths(batch.logits.clone(), argmax)
    assert lengths == [expected, CANVAS, 0]


@pytest.mark.parametrize("seed", range(30))
def test_left_to_right_decoding_is_the_fixed_point(seed):
    """Logits that do not move: k steps settle k positions at least, and all is as decoded alone.

    Whatever step it ends at, the clean prefix is free of bad words, and no shorter than that.
    """
    rng = np.random.default_rng(seed)
    words = [rng.integers(0, 4, length).tolist() for length in (1, 2, 2, 3, 3, 4)]
    request = params(bad_words=words, frequency_penalty=1.0, repetition_penalty=1.3, min_tokens=9)
    batch = Batch([request], seed, outputs=[4], widths=[CANVAS], steps_done=0)
    batch.logits[:, :4] += 6  # few tokens matter, and they repeat
    alone = list(batch.outputs[0])
    for p in range(CANVAS):
        row = edited(batch.logits[p], request, batch.prompts[0], alone, STOPS)
        alone.append(int(row.argmax()))
    expected = alone[4:]
    for step in range(1, CANVAS + 2):
        logits = batch.edit()
        argmax = logits.argmax(-1)
        settled = min(step, CANVAS)
        assert argmax[:settled].tolist() == expected[:settled]
        (clean,) = batch.clean_lengths(logits, argmax[None])
        assert clean >= settled
        output = batch.outputs[0] + argmax[:clean].tolist()
        assert first_bad_word(words, output, 4) is None
        batch.canvases.argmax_canvas[batch.slots] = argmax
        batch.canvases.steps_done[:] = step
    assert argmax.tolist() == expected
