"""A second family: what the engine allocates, hands to it and keeps is what the family says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.family import Canvases, Column, Denoised, Family
from dllm.engine.state import CanvasState, denoise_rows
from dllm.models.gemma import step as gemma
from dllm.models.gemma.settings import GemmaSettings
from dllm.ops import noise
from dllm.ops.dispatch import row_stats
from dllm.ops.filters import RowFilters
from dllm.settings.admission import admit
from dllm.settings.checks import FloatRange
from dllm.settings.denoising import NO_TOKEN, CanvasWindow, Parameter
from dllm.settings.request import RequestOptions

VOCAB, CANVAS, MASK = 12, 4, 11
GEMMA = GemmaSettings(CANVAS, 10, 0.4, 0.8, 0.1, 0.2, 1, "symmetric")


@dataclass(frozen=True)
class MaskSettings:
    """Unmask what the model is sure of."""

    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("threshold", "threshold", FloatRange(0.0, 1.0), "float32"),
    )
    one_step: ClassVar[Mapping[str, int]] = {}
    modes: ClassVar[Mapping[str, Mapping[str, float]]] = {}
    block_size: ClassVar[int] = 1
    never_emitted: ClassVar[tuple[int, ...]] = ()
    canvas_length: int = CANVAS
    canvas_window: CanvasWindow = "symmetric"
    threshold: float = 0.9

    def of_request(self, asked: Mapping[str, float], temperature: float) -> dict[str, float]:
        return dict(asked)


class Masked(Family):
    """A canvas starts as masks; each step keeps the tokens that are likely enough."""

    settings = MaskSettings()
    carried = (Column("last_kept", (CANVAS,), torch.int32),)

    def fresh_canvas(self, seeds: Tensor, starts: Tensor) -> Tensor:
        return torch.full((len(seeds), CANVAS), MASK)

    def denoise(
        self, logits: Tensor, rows: CanvasRows, canvases: Canvases, filters: RowFilters | None
    ) -> Denoised:
        temperature = torch.ones(len(logits))
        starts = rows.seq_lens - rows.widths
        steps = canvases.steps_done, rows.seq_lens
        drawn = noise.step_noise(canvases.seeds, starts, *steps, CANVAS, logits.shape[-1])
        keys = drawn.keys[rows.row_of, rows.place]
        stats = row_stats(logits, temperature, keys, None, filters)
        is_sure = torch.exp(-stats.log_z) >= canvases.numbers["threshold"][rows.row_of]
        is_kept = ((canvases.ids != MASK) | is_sure)[rows.padded]  # [R, C]
        ids = torch.where(canvases.ids != MASK, canvases.ids, stats.argmax)[rows.padded]
        canvas = torch.where(is_kept, ids, MASK)
        return Denoised(
            canvas=canvas,
            fresh=self.fresh_canvas(canvases.seeds, rows.seq_lens),
            argmax_canvas=ids,
            accepted=is_kept,
            converged=is_kept.all(dim=-1) & (rows.widths > 0),
            steps_done=canvases.steps_done + 1,
            carried={"last_kept": is_kept.int()},
            temperature=temperature,
            stats=stats,
        )


@pytest.fixture
def state() -> CanvasState:
    return CanvasState(Masked(), 3, VOCAB, torch.float32, torch.device("cpu"))


def options(**extra: float) -> RequestOptions:
    return admit(SamplingParams(extra_args=extra), Masked.settings, VOCAB)


def logits_of(peaks: list[float]) -> Tensor:
    """Rows whose likeliest token is the row's number, by so much."""
    logits = torch.zeros(len(peaks), VOCAB)
    logits[torch.arange(len(peaks)), torch.arange(len(peaks))] = torch.tensor(peaks)
    return logits


def test_its_numbers_and_columns_are_allocated_and_nothing_of_another_familys(state):
    assert state.numbers.keys() == {"threshold"} and state.carried.keys() == {"last_kept"}
    assert state.soft_embeds.shape[-1] == 0
    assert state.carried["last_kept"].shape == (4, CANVAS)


def test_a_request_sets_its_numbers_and_a_reset_clears_its_columns(state):
    state.carried["last_kept"][1] = 1
    state.reset(1, options(diffusion_threshold=0.25), seed=7, prompt_len=5)
    state.apply_staged_writes()
    assert state.numbers["threshold"][1] == 0.25 and not state.carried["last_kept"][1].any()
    state.reset(1, options(), seed=7, prompt_len=5)
    state.apply_staged_writes()
    assert state.numbers["threshold"][1] == pytest.approx(0.9)


def test_numbers_of_another_family_are_unknown_to_it():
    with pytest.raises(VLLMValidationError, match="unknown extra argument 'diffusion_t_min'"):
        options(diffusion_t_min=0.1)
    with pytest.raises(VLLMValidationError, match=r"diffusion_threshold = 2; allowed: a number of"):
        options(diffusion_threshold=2)


def test_it_denoises_two_requests_to_the_end(state):
    for slot, threshold in ((0, 0.9), (2, 0.0)):
        state.reset(slot, options(diffusion_threshold=threshold), seed=slot, prompt_len=5)
        state.apply_staged_writes()
    rows = CanvasRows.whole(torch.tensor([5, 5]), CANVAS)._replace(slots=torch.tensor([0, 2]))
    canvas = Masked().fresh_canvas(torch.zeros(2), torch.zeros(2))
    logits = logits_of([9.0, 0.5, 9.0, 0.5] * 2)
    free = torch.full((canvas.numel(),), NO_TOKEN)
    first = denoise_rows(logits, canvas.flatten(), free, rows, state, Masked(), None)
    assert first.converged.tolist() == [False, True]
    assert first.canvas[0].tolist() == [0, MASK, 2, MASK]
    assert first.canvas[1].tolist() == [MASK] * CANVAS  # the canvas behind the emitted one
    assert first.argmax_canvas[1].tolist() == [4, 5, 6, 7]
    assert first.steps_done.tolist() == [1, 0]
    assert first.carried["last_kept"].tolist() == [[1, 0, 1, 0], [0] * CANVAS]
    sure = logits_of([9.0] * 8)
    second = denoise_rows(sure, first.canvas.flatten(), free, rows, state, Masked(), None)
    assert second.converged.tolist() == [True, True]
    assert second.argmax_canvas[0].tolist() == [0, 1, 2, 3]


def test_what_the_warm_up_sends_is_admitted(state):
    """Every family says with which arguments a canvas is emitted after one step."""
    for settings in (Masked.settings, GEMMA):
        params = SamplingParams(extra_args=dict(settings.one_step))
        admit(params, settings, VOCAB)


def test_the_columns_of_gemma_are_those_that_its_step_returns():
    settings = GEMMA
    starts = torch.tensor([3, 9])
    canvases = gemma.first_canvases(torch.tensor([1, 2]), starts, settings, [0], VOCAB)
    rows = CanvasRows.whole(starts, CANVAS)
    step = gemma.denoise(torch.randn(2 * CANVAS, VOCAB), rows, canvases, settings)
    assert step.carried.keys() == {column.name for column in gemma.carried(CANVAS)}
    assert canvases.numbers.keys() == {parameter.name for parameter in settings.parameters}
