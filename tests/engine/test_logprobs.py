"""Logprobs as pure functions: of what is emitted, and of prompts on their way to the client."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip  (lets vLLM's states be made on a CPU)

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

import dllm
from dllm.engine import logprobs
from dllm.engine.algorithm import Denoised
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.logprobs import BlockLogprobs, KeptScores, joined
from dllm.engine.steps import StepRecord, Tile
from dllm.patches.cpu import register_cpu_kernels
from tests.support.recorded_calls import record_calls

VOCAB, SLOTS, CANVAS = 20, 4, 5
WIDTHS = [5, 0, 3, 5]
IDS = [7, 3]


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels() -> None:
    dllm.register()
    register_cpu_kernels()


class Blocks:
    """Four canvases in slots 3, 2, 1, 0; the first wants two top logprobs, the last its own ids."""

    def __init__(
        self, mode: str = "raw_logprobs", is_async: bool = False, keeps: bool = False
    ) -> None:
        sampler = SimpleNamespace(
            logprobs_mode=mode,
            sampling_states=SamplingStates(SLOTS, VOCAB),
            logprob_token_ids_state=LogprobTokenIdsState(SLOTS, torch.device("cpu")),
        )
        sampler.get_logprobs_dims = partial(Sampler.get_logprobs_dims, sampler)
        kept = KeptScores(torch.zeros(SLOTS, CANVAS)) if keeps else None
        self.logprobs = BlockLogprobs(sampler, is_async, kept)
        asked = (SamplingParams(logprob_token_ids=IDS), None, None, SamplingParams(logprobs=2))
        for slot, params in enumerate(asked):
            sampler.sampling_states.add_request(slot, params or SamplingParams())
            self.logprobs.add_request(slot, params or SamplingParams())
        self.logprobs.apply_staged_writes()
        generator = torch.Generator().manual_seed(1)
        num_rows = sum(WIDTHS)
        self.logits = torch.randn(num_rows, VOCAB, generator=generator) * 5
        self.logits[:, 9] = -torch.inf
        self.temperature = torch.rand(num_rows, generator=generator) + 1e-3
        self.batch = SimpleNamespace(
            num_reqs=4,
            idx_mapping_np=np.array([3, 2, 1, 0]),
            cu_num_logits_np=np.cumsum([0, *WIDTHS]),
            seq_lens=torch.tensor(WIDTHS),
            num_draft_tokens_per_req=np.array(WIDTHS),
        )
        self.rows = CanvasRows.of_batch(self.batch, CANVAS, spare_slot=SLOTS)
        self.batch.expanded_idx_mapping = self.rows.slots[self.rows.request_of]
        self.argmax = torch.zeros(4, CANVAS, dtype=torch.int64)
        self.argmax[self.rows.request_of, self.rows.place] = self.logits.argmax(-1)

    def of(self, *num_emitted: int, decided: torch.Tensor | None = None):
        """The logprobs of a step with these logits; ``decided`` ``[R, C]`` by it."""
        nothing = dict.fromkeys(Denoised._fields)
        given = {"argmax_canvas": self.argmax, "temperature": self.temperature, "decided": decided}
        step = Denoised(**nothing | given)
        tile = Tile(**dict.fromkeys(Tile._fields) | self.tile())
        logits = self.logits.clone()
        record = dict.fromkeys(StepRecord._fields) | {
            "tile": tile,
            "logits": logits,
            "denoised": step,
            "decided_scores": self.logprobs.of_decided(logits, step, tile),
            "num_emitted": torch.tensor(num_emitted),
        }
        return self.logprobs.of_blocks(StepRecord(**record))

    def tile(self) -> dict[str, Any]:
        is_read_only = torch.zeros(sum(WIDTHS), dtype=torch.bool)
        return {"batch": self.batch, "rows": self.rows, "is_read_only": is_read_only}


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_rows_ids_and_scores_of_what_is_emitted(mode):
    blocks = Blocks(mode)
    assert blocks.logprobs.are_wanted(blocks.batch)
    result = blocks.of(4, 0, 0, 5)
    emitted = [0, 1, 2, 3, 8, 9, 10, 11, 12]
    assert result.cu_num_generated_tokens == [0, 4, 4, 4]
    expected = (blocks.logits / blocks.temperature[:, None])[emitted].double()
    if mode == "raw_logprobs":
        expected = expected.log_softmax(-1)
    for row, scores in enumerate(expected):
        asked = scores.topk(2).indices.tolist() if row < 4 else IDS
        ids = result.logprob_token_ids[row].tolist()
        assert ids == [int(scores.argmax()), *asked]
        torch.testing.assert_close(result.logprobs[row].double(), scores[ids], rtol=1e-5, atol=1e-5)
    assert result.selected_token_ranks.tolist() == [1] * 9


def test_the_workspace_changes_nothing(monkeypatch):
    """Rows by rows, so that no copy of all the logits exists."""
    blocks = Blocks()
    at_once = blocks.of(4, 0, 3, 5)
    scored = record_calls(monkeypatch, blocks.logprobs, "_scores")
    monkeypatch.setattr(logprobs, "WORKSPACE_LOGITS", 5 * VOCAB)
    in_parts = blocks.of(4, 0, 3, 5)
    assert [len(logits) for (logits, *_), _ in scored] == [5, 4]
    for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
        assert torch.equal(getattr(in_parts, name), getattr(at_once, name))
    assert in_parts.cu_num_generated_tokens == at_once.cu_num_generated_tokens == [0, 4, 4, 4]


def test_nothing_emitted_and_nobody_asking():
    blocks = Blocks()
    assert blocks.of(0, 0, 0, 0) is None
    blocks.batch.num_reqs, blocks.batch.idx_mapping_np = 2, np.array([2, 1])
    assert not blocks.logprobs.are_wanted(blocks.batch)


def test_without_a_wait_whole_canvases_are_scored():
    """The host does not ask which tokens are emitted; their scores are the same."""
    known = Blocks().of(4, 0, 3, 5)
    blocks = Blocks(is_async=True)
    result = blocks.of(4, 0, 3, 5)
    assert result.cu_num_generated_tokens == [0, 5, 5, 5]  # two requests do not ask
    emitted = [0, 1, 2, 3, 5, 6, 7, 8, 9]
    for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
        assert torch.equal(getattr(result, name)[emitted], getattr(known, name)), name
    assert blocks.of(0, 0, 0, 0).cu_num_generated_tokens == [0, 5, 5, 5]


def test_scores_of_decided_tokens_are_kept_and_nothing_of_the_size_of_the_vocabulary():
    """Two steps decide the odd and the even positions; other logits come in between."""
    blocks = Blocks(keeps=True)
    expected = Blocks().of(5, 0, 0, 5)
    is_even = (torch.arange(CANVAS) % 2 == 0).expand(4, CANVAS)
    logits = blocks.logits.clone()
    nothing = torch.zeros_like(is_even)
    for decided in (is_even, nothing, ~is_even):
        row, place = blocks.rows.request_of, blocks.rows.place
        blocks.logits = torch.where(decided[row, place, None], logits, logits.flip(0))
        blocks.of(0, 0, 0, 0, decided=decided)
    blocks.logits.zero_()
    assert blocks.logprobs._kept._scores.shape == (SLOTS, CANVAS, 1 + 2)  # as was asked
    result = blocks.of(5, 0, 0, 5, decided=nothing)
    assert result.cu_num_generated_tokens == [0, 5, 5, 5]
    for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
        assert torch.equal(getattr(result, name), getattr(expected, name)), name


def test_parts_of_a_batch_are_joined():
    """The second tile asks for nothing; the columns of the third are fewer."""
    first, third = Blocks().of(4, 0, 0, 5), Blocks().of(1, 0, 0, 0)
    third = third._replace(
        logprobs=third.logprobs[:, :2], logprob_token_ids=third.logprob_token_ids[:, :2]
    )
    parts = [
        SimpleNamespace(logprobs_tensors=one, num_sampled=torch.zeros(count))
        for one, count in ((first, 4), (None, 2), (third, 4))
    ]
    result = joined(parts)
    assert result.cu_num_generated_tokens == [0, 4, 4, 4, 9, 9, 9, 10, 10, 10]
    assert torch.equal(result.logprobs[9, :2], third.logprobs[0])
    assert torch.equal(result.logprobs[:9], first.logprobs)
    assert joined(parts[1:2]) is None


def test_a_temperature_near_zero_loses_no_digits():
    """Differences from the maximum are scaled, not the logits."""
    blocks = Blocks()
    blocks.logits[0] = 29.0
    blocks.logits[0, 4] = 29.0 + 1e-4
    blocks.temperature[0] = 1e-4
    blocks.argmax[0, 0] = 4
    gap = blocks.logits[0, 4].double() - 29.0
    scores = torch.zeros(VOCAB, dtype=torch.float64)
    scores[4] = gap / blocks.temperature[0].double()
    expected = scores.log_softmax(-1)[4]
    assert blocks.of(1, 0, 0, 0).logprobs[0, 0].item() == pytest.approx(float(expected), abs=1e-5)
