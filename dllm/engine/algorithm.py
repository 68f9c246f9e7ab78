"""THE INTERFACE of a denoising algorithm: everything that the engine asks of a model family.

It declares which tensors it keeps for each canvas, and implements up to five methods. The
engine does the rest: it schedules canvases, stores their state, edits logits as a request asks, and
emits canvases that have converged. In one denoise step the engine calls, in this order:

    self_condition    makes the model's input of canvas rows: embeddings + the last step's result
    (the model's forward pass; then the logit edits of each request)
    scores_of_texts   under grammars alone: which texts are the best ones
    denoise           logits -> the next canvas, and whether it has converged
    soft_embeddings   computes what `self_condition` gets in the next step

``fresh_canvas`` makes the first canvas behind a prompt or behind an emitted block.

What vLLM loads is the family's model class. Beside what vLLM asks of every model, it has
``make_algorithm(vllm_config)``; ``get_model_state_cls()``, which returns ``DiffusionModelState`` or
a subclass; a ``forward`` that takes ``is_canvas_row`` (``[tokens]`` bool, may be ignored); and a
``compute_logits`` that returns ``LogitRows`` for more rows than ``rows_at_once`` allows. If it has
``gives_raw_logits`` (bool), the engine sets that before a call whose logits may be ``RawLogits``.

Shapes: R canvases in a step, N rows of logits (one for each token of these canvases), C the served
canvas length, V the vocabulary size, hidden the model's hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.thoughts import Thoughts
from dllm.ops.filters import RowFilters
from dllm.ops.row_stats import RowStats
from dllm.settings.denoising import DenoiseSettings


class Column(NamedTuple):
    """A tensor that is kept between denoise steps: ``[slots, *shape]``, 0 when a canvas starts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Canvases(NamedTuple):
    """The state of R canvases before a denoise step.

    Attributes:
        ids: ``[N]`` integers, the canvas tokens that entered the model.
        seeds: ``[R]`` int64, the seed of each request's noise.
        steps_done: ``[R]`` int64, how many denoise steps the canvas has taken.
        argmax_canvas: ``[R, C]`` int64, the most likely tokens of the step before. They would have
            been emitted if the canvas had converged then.
        chosen: ``[N]`` int64, the token that a grammar has chosen for a row, which counts as its
            most likely token; NO_TOKEN in the others, and behind the end of a text.
        temperature: ``[R]`` fp32, of each request; 1 if it is greedy.
        is_greedy: ``[R]`` bool, the most likely token is taken instead of a sample.
        is_stop: ``[slots, V]`` bool, tokens that end the request. What follows the first of them is
            never emitted and need not converge. Indexed by slot (``CanvasRows.slots``) instead of
            by canvas: copying a row for each canvas would copy the length of the vocabulary.
        held: ``[R, C]`` int64, the token that has to be emitted at a position; -1: any. ``denoise``
            honours it with ``with_held_tokens``. A canvas starts with it there.
        thoughts: in front of the canvases; ``denoise`` holds their ends with ``holding_ends``. None
            where there is no engine.
        parameters: ``[R]`` each, ``RequestOptions.parameters`` by name.
        step_state: ``[R, ...]`` each, the algorithm's columns by name.
    """

    ids: Tensor
    seeds: Tensor
    steps_done: Tensor
    argmax_canvas: Tensor
    chosen: Tensor
    temperature: Tensor
    is_greedy: Tensor
    is_stop: Tensor
    held: Tensor
    parameters: Mapping[str, Tensor]
    step_state: Mapping[str, Tensor]
    thoughts: Thoughts | None = None

    def holding_ends(self, tokens: Tensor) -> "Canvases":
        """The same canvases; where a thinking budget ends, the end of thoughts is ``held``.

        Args:
            tokens: ``[R, C]`` int64, as of ``Thoughts.ends_at``.
        """
        if self.thoughts is None:
            return self
        is_end = self.thoughts.ends_at(tokens)
        return self._replace(held=torch.where(is_end, self.thoughts.end[:, None], self.held))

    def with_held_tokens(self, stats: RowStats, rows: CanvasRows) -> RowStats:
        """The statistics in which held tokens are chosen, and certain.

        For ``diffusion_pin_mode: hold``, and thinking budgets. ``denoise`` calls this before it
        decides anything. Logprobs do not come from here: at a held position they say what the model
        itself thinks of the token.

        Args:
            stats: of N rows of logits.
        """
        tokens = self.held[rows.row_of, rows.place]  # [N]
        is_held = tokens >= 0
        return stats._replace(
            argmax=torch.where(is_held, tokens, stats.argmax),
            sample=torch.where(is_held, tokens, stats.sample),
            entropy=torch.where(is_held, 0.0, stats.entropy),
        )


class Denoised(NamedTuple):
    """The result of a denoise step. That of a row without a canvas (width 0) is not read.

    Attributes:
        canvas: ``[R, C]`` int64, the input of the next step, if the canvas has not converged.
        argmax_canvas: ``[R, C]`` int64, the tokens to emit if the canvas has converged.
        accepted: ``[R, C]`` bool, whether ``canvas`` keeps the model's token; else it is noise.
        converged: ``[R]`` bool.
        steps_done: ``[R]`` int64, including this step.
        step_state: ``[R, ...]`` each, the algorithm's columns by name.
        temperature: ``[N]`` fp32, of each row of logits.
        stats: the statistics of each row of logits at that temperature.
        decided: ``[R, C]`` bool, the positions whose logprob is of this step, unless a later step
            has them, too: those that got their token, and given ones. None where not
            ``decides_for_good``.
        num_broken: ``[R]`` int32, rows of logits that are not finite (``step_rows.denoise_rows``).
    """

    canvas: Tensor
    argmax_canvas: Tensor
    accepted: Tensor
    converged: Tensor
    steps_done: Tensor
    step_state: dict[str, Tensor]
    temperature: Tensor
    stats: RowStats
    decided: Tensor | None = None
    num_broken: Tensor | None = None


class DenoisingAlgorithm(ABC):
    """What the engine asks. A model class returns one from ``make_algorithm``.

    No attribute may be replaced after the first request: compiled code does not look again
    (``engine.compilation``).

    Attributes:
        settings: how the algorithm denoises unless a request says otherwise.
        step_state: the tensors that the algorithm keeps between steps.
        decides_for_good: every step decides some positions (``Denoised.decided``), and those of
            earlier steps stay. False: every step decides all positions anew.
        begins_causally: the first token of a canvas is decided by the causal pass in front of it
            (``engine.first_token``).
        is_shifted: row i of the model's output predicts token i + 1, so that a canvas is decided by
            the token in front of it and by all of its own but the last (``engine.shifted_rows``).
            ``denoise`` gets a row for each token of a canvas, as of any other model.
        soft_size: last dimension of what ``soft_embeddings`` returns. None: a step depends on its
            canvas alone, and ``soft_embeddings`` and ``self_condition`` are never called.
    """

    settings: DenoiseSettings
    step_state: tuple[Column, ...] = ()
    decides_for_good: bool = False
    begins_causally: bool = False
    is_shifted: bool = False
    soft_size: int | None = None

    @abstractmethod
    def fresh_canvas(self, seeds: Tensor, starts: Tensor) -> Tensor:
        """The first contents of canvases: ``[R, C]`` int64.

        The result depends on the arguments alone: the same call gives the same canvas.

        Args:
            seeds: ``[R]`` int64, the seed of each request's noise.
            starts: ``[R]`` int64, the position of each canvas's first token in its sequence.
        """

    @abstractmethod
    def denoise(
        self,
        logits: Tensor,
        rows: CanvasRows,
        canvases: Canvases,
        filters: RowFilters | None,
        cap: float | None = None,
    ) -> Denoised:
        """The denoise step after the forward pass. It is compiled: tensor operations only.

        Args:
            logits: ``[N, V]`` fp32, after the edits that requests ask for; or raw ones, if the
                model gives such.
            cap: of raw logits (``logit_rows.RawLogits``); else None.
            rows: which rows of logits belong to which canvas.
            canvases: the state before this step.
            filters: top-k, top-p and min-p of each row of logits; None if no request filters.
        """

    def scores_of_texts(
        self,
        logits: Tensor,
        rows: CanvasRows,
        canvases: Canvases,
        filters: RowFilters | None,
        part: slice,
    ) -> Tensor:
        """What makes a text the best one under a grammar: ``[n, V]`` fp32, of ``part`` of the rows.

        The text with the largest sum is chosen. The result for a row depends on that row alone.

        Args:
            logits: ``[N, V]`` fp32, edited, before the grammar masks them; not changed.
            rows, canvases, filters: as of ``denoise``; nothing is chosen yet.
            part: of the N rows.
        """
        return logits[part]

    def soft_embeddings(
        self, logits: Tensor, denoised: Denoised, cap: float | None = None
    ) -> Tensor:
        """What ``self_condition`` gets as ``soft_embeds`` in the next step: ``[N, soft_size]``.

        Called only if ``soft_size`` is set.

        Args:
            logits, cap: those that ``denoise`` got.
            denoised: what ``denoise`` returned.
        """
        raise NotImplementedError(f"{type(self).__name__} has a soft_size, but no soft_embeddings")

    def self_condition(self, embeds: Tensor, soft_embeds: Tensor, steps_done: Tensor) -> Tensor:
        """The model's input of canvas rows: ``[N, hidden]``. Called only if ``soft_size`` is set.

        Args:
            embeds: ``[N, hidden]``, the embeddings of the canvas tokens.
            soft_embeds: ``[N, soft_size]``, what ``soft_embeddings`` returned in the step before.
                In the first step of a canvas (``steps_done`` 0) its values have no meaning.
            steps_done: ``[N]``, how many denoise steps the row's canvas has taken.
        """
        raise NotImplementedError(f"{type(self).__name__} has a soft_size, but no self_condition")
