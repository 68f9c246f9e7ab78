"""The sampling step of a denoise step, ours and vLLM's built-in one, on the same logits.

Everything between the logits of the canvas rows and the next canvas: row statistics and the draw,
accept, renoise and stop, the soft embeddings for the next step. Ours is the denoise step that the
server calls; the built-in's are its own two functions with the state tensors that its sampler gives
them, compiled as it compiles them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from dllm.engine.canvas_rows import CanvasRows
from dllm.models.gemma import rule
from dllm.models.gemma.settings import GemmaSettings
from dllm.models.gemma.step import denoise, first_canvases
from dllm.ops.dispatch import sparse_product
from dllm.ops.soft_embedding import Shard, exact_product, skipped_mass

T_MIN, T_MAX, MAX_STEPS, ENTROPY_BOUND, CONFIDENCE, WINDOW = 0.4, 0.8, 48, 0.1, 0.005, 2
SEED = 5


@dataclass(frozen=True)
class Shape:
    """R canvases of C tokens; a vocabulary; the hidden size of the embeddings, in bf16."""

    num_canvases: int
    canvas_length: int
    vocab_size: int
    hidden: int
    profile: str

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return self.num_canvases * self.canvas_length


class Outcome(NamedTuple):
    """What both have to agree on."""

    argmax: Tensor  # [N]
    entropy: Tensor  # [N]
    soft: Tensor  # [N, hidden] fp32, not yet scaled by sqrt(hidden)


def make_logits(shape: Shape, device: str) -> Tensor:
    """Made-up logits, [N, V] fp32.

    `open`: normal with a deviation of 3, as at a first step: thousands of tokens of a row have a
    probability that matters. `settled`: a normal bulk around -8 with a deviation of 2.5, 20 tokens
    around 8 and one at 22: at the schedule's temperatures few tokens matter. `half`: half of the
    rows are open, the others settled.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(shape.num_rows, shape.vocab_size)
    for row in range(shape.num_rows):
        logits[row].normal_(generator=generator)
        if shape.profile == "open" or (shape.profile == "half" and row % 2):
            logits[row] *= 3
            continue
        logits[row] = logits[row] * 2.5 - 8
        ids = torch.randint(shape.vocab_size, (21,), generator=generator)
        logits[row, ids] = 8 + 2 * torch.randn(21, generator=generator)
        logits[row, ids[0]] = 22
    return logits.to(device)


def make_embeddings(shape: Shape, device: str) -> Tensor:
    """[V, hidden] bf16, with rows of norm about 1."""
    generator = torch.Generator().manual_seed(1)
    size = (shape.vocab_size, shape.hidden)
    return (torch.randn(size, generator=generator).bfloat16() * shape.hidden**-0.5).to(device)


def temperatures(shape: Shape, device: str) -> Tensor:
    """Of each canvas in the middle of the schedule: [R] fp32."""
    one = rule.temperature(torch.tensor([MAX_STEPS // 2]), MAX_STEPS, T_MIN, T_MAX)
    return one.repeat(shape.num_canvases).to(device)


def prepare_ours(
    shape: Shape, weight: Tensor, is_exact: bool, is_compiled: bool
) -> Callable[[Tensor], Outcome]:
    """Our step on logits [N, V], in the middle of the schedule."""
    settings = GemmaSettings(
        canvas_length=shape.canvas_length,
        max_denoising_steps=MAX_STEPS,
        t_min=T_MIN,
        t_max=T_MAX,
        entropy_bound=ENTROPY_BOUND,
        confidence_threshold=CONFIDENCE,
        stability_threshold=WINDOW - 1,
        canvas_window="symmetric",
    )
    starts = torch.zeros(shape.num_canvases, dtype=torch.int64, device=weight.device)
    rows = CanvasRows.whole(starts, shape.canvas_length)
    canvases = first_canvases(starts + SEED, starts, settings, [1], shape.vocab_size)
    canvases = canvases._replace(steps_done=torch.full_like(starts, MAX_STEPS // 2))
    shard, budget = Shard(weight, 0, shape.vocab_size), skipped_mass(weight.dtype)
    probs_dtype = torch.bfloat16 if is_exact else None
    decide = torch.compile(denoise, dynamic=True) if is_compiled else denoise

    def step(logits: Tensor) -> Outcome:
        denoised = decide(logits, rows, canvases, settings, probs_dtype)
        stats = denoised.stats
        if stats.probs is None:
            soft = sparse_product(logits, denoised.temperature, stats, shard, budget)
        else:
            soft = exact_product(stats.probs, shard)
        return Outcome(stats.argmax, stats.entropy, soft.float())

    return step


@functools.cache
def import_builtin() -> ModuleType:
    """vLLM's module. Raises ImportError where there is no vLLM of 0.32."""
    from dllm.patches.builtin import builtin

    return builtin


def prepare_builtin(shape: Shape, weight: Tensor) -> Callable[[Tensor], Outcome]:
    """The built-in's step on logits [N, V]: `DiffusionSampler.__call__` from its tile on."""
    builtin = import_builtin()
    count, length, device = shape.num_canvases, shape.canvas_length, weight.device
    states = builtin.DiffusionGemmaRequestStates(
        count, length, shape.vocab_size, MAX_STEPS, device, shape.hidden, WINDOW
    )
    slots = torch.arange(count, device=device)
    widths = torch.full((count,), length, device=device)
    sampled = torch.zeros(count, length, dtype=torch.int32, device=device)
    num_sampled = torch.zeros(count, dtype=torch.int32, device=device)
    draft_tokens = torch.zeros(count, length, dtype=torch.int64, device=device)
    temperature, one = temperatures(shape, str(device)), torch.ones((), device=device)

    def statistics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if logits.is_cuda:
            seed = int(torch.randint(0, 2**31 - 1, (1,)).item())
            return builtin.sample_row_stats(logits, temperature, length, seed, weight.dtype)
        return builtin.sample_row_stats_reference(logits, temperature, length, weight.dtype)

    def step(logits: Tensor) -> Outcome:
        states.step.fill_(MAX_STEPS // 2)
        states.is_encoder_phase.zero_()
        argmax, sample, entropy, probs = statistics(logits)
        builtin._compiled_sample_step(
            sample.view(count, length), argmax.view(count, length), entropy.view(count, length),
            probs.view(count, length, -1), slots, slots, slots, widths,
            states.canvas, states.argmax_canvas, states.step, states.is_encoder_phase,
            states.confident, states.self_conditioning_embeds, weight, one,
            states.accepted_canvas_history, states.accepted_canvas_history_len, states.max_steps,
            states.pin_mask, states.seed_canvas, states.read_only,
            sampled, num_sampled, draft_tokens,
            confidence_threshold=CONFIDENCE, vocab_size=shape.vocab_size, CL=length, ST=WINDOW,
            entropy_bound=ENTROPY_BOUND, sc_vocab_start=0, sc_vocab_end=shape.vocab_size,
            tp_size=1, tp_group_name="", compute_sc=True,
        )  # fmt: skip
        soft = states.self_conditioning_embeds.view(-1, shape.hidden)
        return Outcome(argmax, entropy, soft)

    return step
