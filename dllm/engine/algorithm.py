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

What vLLM loads is the family's model class. It also has ``make_algorithm(vllm_config)``;
``get_model_state_cls()``, which returns ``DiffusionModelState`` or a subclass; a ``forward`` that
takes ``is_canvas_row`` (``[tokens]`` bool, may be ignored); and a ``compute_logits`` that returns
``[N, V]`` fp32. It may have ``raw_logits``, too: ``[N, V]`` in its dtype, which is not soft-capped,
and the cap (None: there is none). On a GPU the engine reads these where nobody needs whole rows.

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
    """The state of R canvases before a denoise step."""

    ids: Tensor  # [N] integers, the tokens that entered the model
    seeds: Tensor  # [R] int64, of each request's noise
    steps_done: Tensor  # [R] int64
    argmax_canvas: Tensor  # [R, C] int64, the most likely tokens of the step before
    # [N] int64, the token that a grammar has chosen, which counts as the most likely one; NO_TOKEN
    # in other rows, and behind the end of a text.
    chosen: Tensor
    temperature: Tensor  # [R] fp32, 1 if greedy
    is_greedy: Tensor  # [R] bool
    # [slots, V] bool, tokens that end the request: what follows the first of them is never emitted
    # and need not converge. By slot (``CanvasRows.slots``): a row for each canvas would be a copy
    # as long as the vocabulary.
    is_stop: Tensor
    # [R, C] int64, the token that has to be emitted at a position; -1: any. A canvas starts with it
    # there; ``denoise`` honours it with ``with_held_tokens``.
    held: Tensor
    parameters: Mapping[str, Tensor]  # [R] each, ``RequestOptions.parameters``
    step_state: Mapping[str, Tensor]  # [R, ...] each, the algorithm's columns by name
    thoughts: Thoughts  # in front of them; ``denoise`` holds their ends with ``holding_ends``

    def holding_ends(self, tokens: Tensor) -> "Canvases":
        """Where a thinking budget ends, the end of thoughts is ``held``. ``tokens``: ``[R, C]``."""
        is_end = self.thoughts.ends_at(tokens)
        return self._replace(held=torch.where(is_end, self.thoughts.end[:, None], self.held))

    def with_held_tokens(self, stats: RowStats, rows: CanvasRows) -> RowStats:
        """Statistics of N rows in which held tokens are chosen, and certain.

        For ``diffusion_pin_mode: hold``, and thinking budgets; before ``denoise`` decides anything.
        Logprobs do not come from here: they say what the model itself thinks of such a token.
        """
        tokens = self.held[rows.request_of, rows.place]  # [N]
        is_held = tokens >= 0
        return stats._replace(
            argmax=torch.where(is_held, tokens, stats.argmax),
            sample=torch.where(is_held, tokens, stats.sample),
            entropy=torch.where(is_held, 0.0, stats.entropy),
        )


class Denoised(NamedTuple):
    """The result of a denoise step. That of a row without a canvas (width 0) is not read."""

    canvas: Tensor  # [R, C] int64, the input of the next step, if it has not converged
    argmax_canvas: Tensor  # [R, C] int64, the tokens to emit if it has
    accepted: Tensor  # [R, C] bool, whether ``canvas`` keeps the model's token; else it is noise
    converged: Tensor  # [R] bool
    steps_done: Tensor  # [R] int64, including this step
    step_state: dict[str, Tensor]  # [R, ...] each, the algorithm's columns by name
    temperature: Tensor  # [N] fp32
    stats: RowStats  # of each row of logits at that temperature
    # [R, C] bool, the positions whose logprob is of this step, unless a later step has them, too:
    # those that got their token, and given ones. None where not ``decides_for_good``.
    decided: Tensor | None = None
    # [R] int32, rows of logits that are not finite (``denoise_rows``)
    num_broken: Tensor | None = None


class DenoisingAlgorithm(ABC):
    """No attribute may be replaced after the first request: compiled code does not look again
    (``engine.compilation``).
    """

    settings: DenoiseSettings
    step_state: tuple[Column, ...] = ()
    # Every step decides some positions (``Denoised.decided``), and those of earlier steps stay.
    # False: every step decides all positions anew.
    decides_for_good: bool = False
    # The first token of a canvas is decided by the causal pass in front of it (``first_token``).
    begins_causally: bool = False
    # Row i of the model's output predicts token i + 1, so that a canvas is decided by the token in
    # front of it and by all of its own but the last (``engine.shifted_rows``). ``denoise`` gets a
    # row for each token of a canvas, as of any other model.
    is_shifted: bool = False
    # Last dimension of ``soft_embeddings``. None: a step depends on its canvas alone, and
    # ``soft_embeddings`` and ``self_condition`` are never called.
    soft_size: int | None = None

    @abstractmethod
    def fresh_canvas(self, seeds: Tensor, starts: Tensor) -> Tensor:
        """``[R, C]`` int64, the same for the same call. They start at ``starts`` ``[R]`` int64."""

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
            logits, cap: ``[N, V]`` fp32, edited, and None; or ``raw_logits`` of the model.
            filters: of each row of logits; None if no request filters.
        """

    def scores_of_texts(
        self,
        logits: Tensor,
        rows: CanvasRows,
        canvases: Canvases,
        filters: RowFilters | None,
        part: slice,
    ) -> Tensor:
        """What makes a text the best one under a grammar: ``[n, V]`` fp32, of ``part`` of N rows.

        The text with the largest sum is chosen. The result for a row depends on that row alone.

        Args:
            logits: ``[N, V]`` fp32, edited, before the grammar masks them; not changed.
            canvases: as of ``denoise``; nothing is chosen yet.
        """
        return logits[part]

    def soft_embeddings(
        self, logits: Tensor, denoised: Denoised, cap: float | None = None
    ) -> Tensor:
        """``soft_embeds`` of the next step: ``[N, soft_size]``, from the logits of ``denoise``."""
        raise NotImplementedError(f"{type(self).__name__} has a soft_size, but no soft_embeddings")

    def self_condition(self, embeds: Tensor, soft_embeds: Tensor, steps_done: Tensor) -> Tensor:
        """The model's input of canvas rows: ``[N, hidden]``, as their tokens' ``embeds``.

        ``soft_embeds`` ``[N, soft_size]`` are of the step before; no meaning where ``steps_done``
        is 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has a soft_size, but no self_condition")
