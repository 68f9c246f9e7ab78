"""Logits in tiles of whole canvases: the same tokens and logprobs, in less memory."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.frame_taker import FrameTaker
from dllm.engine.logit_rows import rows_at_once, tile_bounds
from dllm.engine.sampler import DiffusionSampler
from dllm.engine.step_rows import num_rejected
from tests.engine.test_parity import CANVAS, prompt
from tests.support.async_engine import get_async_engine
from tests.support.engine_harness import assert_same_logprobs, get_engine
from tests.support.recorded_calls import record_calls


@pytest.mark.parametrize(
    ("starts", "rows", "bounds"),
    [
        ([0, 4, 8, 12], 12, [(0, 3)]),
        ([0, 4, 8, 12], 11, [(0, 2), (2, 3)]),
        ([0, 4, 8, 12], 3, [(0, 1), (1, 2), (2, 3)]),  # a canvas is never cut
        ([0, 0, 4, 4, 8, 8], 4, [(0, 3), (3, 5)]),  # requests without a canvas ride along
        ([0, 0], 4, [(0, 1)]),
    ],
)
def test_tiles_are_whole_canvases(starts, rows, bounds):
    assert tile_bounds(np.array(starts), rows) == bounds


def test_a_canvas_starts_where_its_tokens_do_whatever_is_left_out():
    """The second has logits for its first two tokens alone, and keeps no KV of any."""
    batch: Any = SimpleNamespace(
        num_reqs=3,
        idx_mapping_np=np.array([2, 0, 1]),
        cu_num_logits_np=np.array([0, 8, 10, 10]),
        num_draft_tokens_per_req=np.array([8, 8, 0]),
        seq_lens=torch.tensor([24, 50, 7], dtype=torch.int32),
    )
    rows = CanvasRows.of_batch(batch, 8, spare_slot=3)
    assert rows.widths.tolist() == [8, 2, 0]
    assert rows.starts.tolist() == [16, 42, 7]
    state: Any = SimpleNamespace(commits=torch.zeros(4, dtype=torch.bool))
    for block_size, expected in ((1, [8, 8, 0]), (4, [8, 10, 3])):
        assert num_rejected(state, rows, rows.seq_lens, block_size).tolist() == expected


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Two whole canvases, a narrow one, a prompt of two chunks; every kind of edit and filter."""
    contexts = [prompt(20), prompt(33, salt=1), prompt(9, salt=2), prompt(300, salt=3)]
    options = [
        dict(seed=1, logprobs=3),
        dict(seed=2, top_k=20, repetition_penalty=1.3, extra_args={"diffusion_canvas_length": 13}),
        dict(seed=3, top_p=0.9, logit_bias={30: 2.0}, logprobs=1),
        dict(temperature=0.0, seed=4),
    ]
    return contexts, [
        SamplingParams(max_tokens=2 * CANVAS, ignore_eos=True, **given) for given in options
    ]


@pytest.mark.parametrize("get", [get_engine, get_async_engine])
def test_tiles_change_nothing(engine, checkpoint, monkeypatch, get):
    whole = engine.outputs(*requests())
    ours, limit = get(checkpoint(), max_num_batched_tokens=256), CANVAS + 13
    monkeypatch.setattr(ours.runner.sampler, "_rows_at_once", limit)
    seen = record_calls(monkeypatch, ours.runner.model, "compute_logits")
    tiled = ours.outputs(*requests())
    sizes = {len(hidden) for (hidden,), _ in seen}
    assert max(sizes) <= limit and len(sizes) > 1
    for a, b in zip(whole, tiled, strict=True):
        assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
        assert_same_logprobs(a.outputs[0].logprobs, b.outputs[0].logprobs)


PLAIN = [
    SamplingParams(max_tokens=2 * CANVAS, ignore_eos=True, **given)
    for given in (dict(seed=1), dict(seed=2, top_k=20), dict(seed=3, temperature=0.0))
]


@pytest.mark.parametrize("limit", [None, CANVAS + 13], ids=["at once", "in tiles"])
@pytest.mark.parametrize("get", [get_engine, get_async_engine])
def test_raw_logits_change_nothing(checkpoint, monkeypatch, get, limit):
    """As on a GPU: where nobody needs whole rows, soft-capping is left to those who read them."""
    contexts, edited = requests()
    plain = [given.clone() for given in PLAIN]
    if limit is None:  # vLLM needs those of prompts at once
        plain[0].prompt_logprobs = 1
    contexts, sampling = contexts[:3] + contexts, plain + edited
    ours = get(checkpoint(), max_num_batched_tokens=256)
    outputs = [ours.outputs(contexts[:3], plain), ours.outputs(contexts, sampling)]
    if limit is not None:
        monkeypatch.setattr(ours.runner.sampler, "_rows_at_once", limit)
    steps = record_calls(monkeypatch, DiffusionSampler, "_denoise_tile")
    monkeypatch.setattr(ours.runner.sampler, "_may_read_raw_logits", True)
    ours.reset_prefix_cache()
    found = [ours.outputs(contexts[:3], plain)]
    assert {tile.is_raw for (_, _, tile), _ in steps} == {True}
    found.append(ours.outputs(contexts, sampling))
    assert {tile.is_raw for (_, _, tile), _ in steps} == {True, False}  # while a request edits
    for whole, raw in zip(outputs, found, strict=True):
        assert [a.outputs[0].token_ids for a in raw] == [b.outputs[0].token_ids for b in whole]
        for a, b in zip(raw, whole, strict=True):
            assert_same_logprobs(a.prompt_logprobs, b.prompt_logprobs)


def test_every_request_gets_the_frames_of_its_own_canvas(engine, monkeypatch):
    contexts, sampling = requests()
    stream = SamplingParams(extra_args={"diffusion_stream": "canvas"})
    add = FrameTaker.add_request
    monkeypatch.setattr(FrameTaker, "add_request", lambda taker, slot, _: add(taker, slot, stream))
    seen: dict[str, set[int]] = {}

    def take(taker: FrameTaker) -> list[Any]:
        for frames in taker._pending:
            for req_id, packed in zip(frames.req_ids, frames.packed, strict=True):
                seen.setdefault(req_id, set()).add(int(packed[0, -1]))  # where the canvas starts
        taker._pending = []
        return []

    monkeypatch.setattr(FrameTaker, "take", take)
    monkeypatch.setattr(engine.runner.sampler, "_rows_at_once", CANVAS)
    ids = [engine.add(*pair) for pair in zip(contexts, sampling, strict=True)]
    engine.run()
    seen = {req_id.split("-")[0]: starts for req_id, starts in seen.items()}
    for req_id, context, one in zip(ids, contexts, sampling, strict=True):
        width = (one.extra_args or {}).get("diffusion_canvas_length", CANVAS)
        last = len(context) + 2 * CANVAS
        assert seen[req_id] == set(range(len(context), last, width))


@pytest.mark.parametrize(
    ("gib", "options", "canvases"),
    [
        (None, {}, 4),  # a CPU
        (24, {}, 4),
        (79.6, {}, 9),  # what a card of 80 GB has
        (140, {}, 17),
        (140, {"logits_workspace_mib": 2048}, 8),
    ],
)
def test_the_workspace_follows_the_memory_of_a_gpu(monkeypatch, gib, options, canvases):
    """Of 256 tokens and the released vocabulary."""
    memory = lambda: int((gib or 0) * 2**30)  # noqa: E731
    gpu = SimpleNamespace(is_cuda=lambda: gib is not None, get_device_total_memory=memory)
    monkeypatch.setattr("dllm.engine.logit_rows.current_platform", gpu)
    model = SimpleNamespace(get_vocab_size=lambda: 262_144)
    config: Any = SimpleNamespace(additional_config={"dllm": options}, model_config=model)
    assert rows_at_once(config) // 256 == canvases
