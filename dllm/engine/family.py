"""THE INTERFACE of a family of diffusion language models: all that the engine asks of one.

A family says what its state holds and implements four methods. The engine does the rest: it
schedules canvases, keeps their state by slot, edits logits, emits what has converged. A step is

    condition     what canvas rows enter the model as
    (the model's forward pass, the edits of a request)
    denoise       logits -> the next canvas, and who has converged
    look_back     what the next step of a canvas is conditioned on
    fresh_canvas  where a canvas starts that follows a prompt or an emitted block

Shapes: R canvases of a step, N rows of logits, C the served canvas length, V the vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dllm.engine.canvas_rows import CanvasRows
from dllm.ops.filters import RowFilters
from dllm.ops.row_stats import RowStats
from dllm.settings.denoising import DenoiseSettings


class Column(NamedTuple):
    """A tensor of state that a family carries between steps: ``[slots, *shape]``, 0 at first."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Canvases(NamedTuple):
    """What is known of R canvases before a denoise step.

    Attributes:
        ids: ``[N]`` integers, the canvas tokens that entered the model.
        seeds: ``[R]`` int64, of each request's noise.
        steps_done: ``[R]`` int64, denoise steps that the canvas has taken.
        argmax_canvas: ``[R, C]`` int64, what the step before would have emitted.
        is_greedy: ``[R]`` bool, candidates are the argmax.
        is_stop: ``[slots, V]`` bool, tokens behind the first of which nothing need converge. By
            slot (``CanvasRows.slots``), because a row of it is as long as the vocabulary.
        numbers: ``[R]`` each, ``RequestOptions.numbers`` by name.
        carried: ``[R, ...]`` each, the columns of the family by name.
    """

    ids: Tensor
    seeds: Tensor
    steps_done: Tensor
    argmax_canvas: Tensor
    is_greedy: Tensor
    is_stop: Tensor
    numbers: Mapping[str, Tensor]
    carried: Mapping[str, Tensor]


class Denoised(NamedTuple):
    """What a denoise step decided. Rows of width 0 mean nothing but in ``fresh``.

    Attributes:
        canvas: ``[R, C]`` int64, the input of the next step, if the canvas goes on.
        fresh: ``[R, C]`` int64, the canvas behind the row's last token.
        argmax_canvas: ``[R, C]`` int64, what is emitted where the canvas has converged.
        converged: ``[R]`` bool.
        steps_done: ``[R]`` int64, this step included.
        carried: ``[R, ...]`` each, the columns of the family.
        temperature: ``[N]`` fp32, of each row of logits.
        stats: of each row of logits at that temperature.
    """

    canvas: Tensor
    fresh: Tensor
    argmax_canvas: Tensor
    converged: Tensor
    steps_done: Tensor
    carried: dict[str, Tensor]
    temperature: Tensor
    stats: RowStats


class Family(ABC):
    """What the engine asks of a family; a model class makes one with ``make_family``.

    Attributes:
        block_size: a head row sees the keys of its own block of so many positions; 1: it is causal.
            The engine serves 1 only.
        settings: how it denoises unless a request says otherwise.
        carried: its columns of state. They are 0 when a canvas starts.
        soft_size: how wide ``look_back`` is; None: a step is conditioned on its canvas alone.
    """

    block_size: ClassVar[int] = 1
    settings: DenoiseSettings
    carried: tuple[Column, ...] = ()
    soft_size: int | None = None

    @abstractmethod
    def fresh_canvas(self, seeds: Tensor, starts: Tensor) -> Tensor:
        """What canvases at ``starts`` begin as: ``[R, C]`` int64.

        A function of its arguments alone: drawing a canvas twice draws the same one.

        Args:
            seeds, starts: ``[R]`` int64.
        """

    @abstractmethod
    def denoise(
        self, logits: Tensor, rows: CanvasRows, canvases: Canvases, filters: RowFilters | None
    ) -> Denoised:
        """One denoise step behind the forward pass. Compiled: tensor operations only.

        Args:
            logits: ``[N, V]`` fp32, edited.
            filters: top-k, top-p and min-p of each row of logits; None where nobody filters.
        """

    def look_back(self, logits: Tensor, denoised: Denoised) -> Tensor:
        """What the next step is conditioned on: ``[N, soft_size]``. Not called without a size."""
        raise NotImplementedError(f"{type(self).__name__} has a soft_size, but no look_back")

    def condition(self, embeds: Tensor, soft_embeds: Tensor, steps_done: Tensor) -> Tensor:
        """What canvas rows enter the model as: ``[N, hidden]``. Not called without a ``soft_size``.

        Args:
            embeds: ``[N, hidden]``, of the canvas tokens.
            soft_embeds: ``[N, soft_size]``, what ``look_back`` left; anything at the first step.
            steps_done: ``[N]``, denoise steps that the row's canvas has taken.
        """
        raise NotImplementedError(f"{type(self).__name__} has a soft_size, but no condition")
