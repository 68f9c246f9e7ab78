"""Frames of the worker: the same on a CPU and on a GPU, and only of watched canvases."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from dllm.engine import frame_taker
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.frame_taker import FrameTaker
from tests.support.watched_device import DeviceWatch, on_device

C = 4
WIDTHS = [4, 0, 2, 3]  # of rows; their slots are 3, 1, 0, 2
SLOTS = [3, 1, 0, 2]


@pytest.fixture
def taker(monkeypatch: pytest.MonkeyPatch) -> FrameTaker:
    group = SimpleNamespace(is_first_rank=True)
    monkeypatch.setattr(frame_taker, "get_tp_group", lambda: group)
    taker = FrameTaker(num_slots=4)
    taker.group = group  # type: ignore[attr-defined]
    return taker


def watched(every: str | None = None, form: str | None = "canvas") -> SamplingParams:
    extra = {"diffusion_stream": form, "diffusion_stream_every": every}
    return SamplingParams(extra_args={key: value for key, value in extra.items() if value})


def batch() -> Any:
    return SimpleNamespace(
        num_reqs=4,
        req_ids=["a", "b", "c", "d"],
        idx_mapping_np=np.array(SLOTS),
        idx_mapping=torch.tensor(SLOTS),
        cu_num_logits_np=np.cumsum([0, *WIDTHS]),
        seq_lens=torch.tensor([104, 50, 32, 23]),
        num_draft_tokens_per_req=np.array(WIDTHS),
        expanded_local_pos=torch.tensor([p for w in WIDTHS for p in range(w)]),
    )


def record(where: Any = lambda x: x) -> Any:
    """A step of four canvases; ``where`` puts tensors on a device."""
    generator = torch.Generator().manual_seed(1)
    denoised = dict(
        argmax_canvas=torch.randint(0, 262_144, (4, C), generator=generator),
        accepted=torch.rand(4, C, generator=generator) < 0.5,
        converged=torch.tensor([False, False, True, False]),
        steps_done=torch.tensor([9, 8, 6, 7]),
    )
    stats = dict(entropy=torch.rand(sum(WIDTHS), generator=generator))
    denoised = SimpleNamespace(**where(denoised), stats=SimpleNamespace(**where(stats)))
    rows = where(CanvasRows.of_batch(batch(), C, spare_slot=4))
    return SimpleNamespace(denoised=denoised, tile=SimpleNamespace(batch=batch(), rows=rows))


def take(taker: FrameTaker, traces: torch.Tensor | None = None, where: Any = lambda x: x) -> Any:
    """The frames."""
    canvases = torch.zeros(5, C, dtype=torch.int64)
    canvases[SLOTS] = torch.arange(4 * C).view(4, C) + 262_000
    taker.read(record(where), where(canvases), where(traces))
    return taker.take()


def test_watched_canvases_are_packed_and_others_are_not(taker):
    taker.add_request(3, watched())
    taker.add_request(1, watched())  # has no canvas in this step
    taker.add_request(0, watched(every="visit"))
    taker.add_request(2, SamplingParams())
    (frames,) = take(taker)
    assert frames.req_ids == ["a", "c"] and frames.every == ["pass", "visit"]
    assert frames.packed.shape == (2, 4, C + 1)
    first, second = frames.packed
    assert first[:, -1].tolist() == [100, 9, 4, 0]  # start, step, width, has it converged
    assert second[:, -1].tolist() == [30, 6, 2, 1]
    assert first[0, :C].tolist() == [262_000, 262_001, 262_002, 262_003]
    assert second[1, :2].tolist() == record().denoised.argmax_canvas[2, :2].tolist()
    assert second[2, :2].tolist() == record().denoised.stats.entropy[4:6].tolist()
    assert second[3, :2].tolist() == record().denoised.accepted[2, :2].tolist()


@pytest.mark.parametrize("traces", [None, torch.rand(4, C, 4)], ids=["frames", "traces"])
def test_a_gpu_packs_what_the_host_packs_and_nobody_waits(taker, traces):
    for slot in range(4):
        taker.add_request(slot, watched())
    (expected,) = take(taker, traces)
    with DeviceWatch() as watch:
        (found,) = take(taker, traces, on_device)
        assert found.packed.is_pinned()
    assert isinstance(expected.packed, np.ndarray) and not watch.findings
    assert torch.equal(found.packed, torch.from_numpy(expected.packed))


def test_only_the_first_rank_sends_frames(taker):
    taker.group.is_first_rank = False
    taker.add_request(3, watched())
    assert not take(taker)
