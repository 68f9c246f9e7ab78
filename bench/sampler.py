"""The sampling step, ours and vLLM's built-in, on the same logits: cases of ``bench.kernels``.

It is everything between the logits of the canvas rows and the next canvas: row statistics and the
draw, accept, renoise and stop, the soft embeddings for the next step. Ours is the denoise step that
the server calls. The built-in's are its own two functions with the state tensors that its sampler
gives them, compiled as it compiles them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.context import Rows
from bench.tables import Spread, markdown, section

# What a shape is called, implementations by name, and what is wrong with a result beside the first.
Sampling = tuple[dict[str, object], dict[str, Callable[[], Any]], Callable[[Any, Any], str]]

BUILTIN, SPARSE, EXACT = "built-in", "ours, sparse", "ours, exact"
PROFILES = ("open", "half", "settled")  # of `make_logits`
T_MIN, T_MAX, MAX_STEPS, ENTROPY_BOUND, CONFIDENCE, STABILITY = 0.4, 0.8, 48, 0.1, 0.005, 2


class Outcome(NamedTuple):
    """What sampling steps have to agree on."""

    argmax: Tensor  # [N]
    entropy: Tensor  # [N]
    soft: Tensor  # [N, hidden] fp32, not yet scaled by sqrt(hidden)


def sampler_cases(smoke: bool, device: str) -> Iterator[Sampling]:
    """Rows, vocabulary, size of embeddings, and how sure the rows are."""
    sizes = ([9000], [16], [8]) if smoke else ([32_768, 262_144], [256, 2816], [64, 256])
    for vocab, hidden, rows in itertools.product(*sizes):
        weight = torch.randn(vocab, hidden, device=device).mul_(hidden**-0.5).bfloat16()
        for profile in PROFILES:
            logits = make_logits(rows, vocab, profile, device)
            about = {"rows": rows, "vocab_size": vocab, "hidden": hidden, "profile": profile}
            ours = {
                name: functools.partial(our_step(rows, weight, name == EXACT, not smoke), logits)
                for name in (SPARSE, EXACT)
            }
            builtin = functools.partial(builtin_step(rows, weight), logits)
            runs: dict[str, Callable[[], Any]] = {BUILTIN: builtin, **ours}
            yield about, runs, functools.partial(_disagree, weight)


def make_logits(rows: int, vocab: int, profile: str, device: str) -> Tensor:
    """Made-up logits, ``[rows, vocab]`` fp32.

    ``open``: normal with a deviation of 3, as at a first step: thousands of tokens of a row have a
    probability that matters. ``settled``: a normal bulk around -8 with a deviation of 2.5, 20
    tokens around 8 and one at 22, so that few tokens matter. ``half``: every other row is settled.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(rows, vocab, device=device).normal_(generator=generator)
    settled = logits.mul_(3)[
        {"open": slice(0), "half": slice(0, None, 2)}.get(profile, slice(None))
    ]
    settled.mul_(2.5 / 3).sub_(8)
    chosen = (len(settled), 21)
    ids = torch.randint(vocab, chosen, generator=generator, device=device)
    settled.scatter_(1, ids, 8 + 2 * torch.randn(chosen, generator=generator, device=device))
    settled.scatter_(1, ids[:, :1], 22)
    return logits


def our_step(
    rows: int, weight: Tensor, is_exact: bool, is_compiled: bool
) -> Callable[[Tensor], Outcome]:
    """Our step on two canvases, in the middle of the schedule."""
    from dllm.engine.canvas_rows import CanvasRows
    from dllm.models.gemma.settings import GemmaSettings
    from dllm.models.gemma.step import denoise, first_canvases
    from dllm.ops.dispatch import sparse_product
    from dllm.ops.soft_embedding import Shard, exact_product, skipped_mass

    settings = GemmaSettings(
        rows // 2, MAX_STEPS, T_MIN, T_MAX, ENTROPY_BOUND, CONFIDENCE, STABILITY - 1, "symmetric"
    )
    starts = torch.zeros(2, dtype=torch.int64, device=weight.device)
    canvas_rows = CanvasRows.whole(starts, rows // 2)
    canvases = first_canvases(starts + 5, starts, settings, [1], len(weight))
    canvases = canvases._replace(steps_done=torch.full_like(starts, MAX_STEPS // 2))
    shard, budget = Shard(weight, 0, len(weight)), skipped_mass(weight.dtype)
    decide = torch.compile(denoise, dynamic=True) if is_compiled else denoise

    def step(logits: Tensor) -> Outcome:
        dtype = torch.bfloat16 if is_exact else None
        done = decide(logits, canvas_rows, canvases, settings, dtype)
        stats = done.stats
        if stats.probs is None:
            soft = sparse_product(logits, done.temperature, stats, shard, budget)
        else:
            soft = exact_product(stats.probs, shard)
        return Outcome(stats.argmax, stats.entropy, soft.float())

    return step


def builtin_step(rows: int, weight: Tensor) -> Callable[[Tensor], Outcome]:
    """The built-in's step on two canvases: ``DiffusionSampler.__call__`` from its tile on."""
    from dllm.models.gemma import rule
    from dllm.patches.builtin import builtin

    (vocab, hidden), device, width = weight.shape, weight.device, rows // 2
    states = builtin.DiffusionGemmaRequestStates(
        2, width, vocab, MAX_STEPS, device, hidden, STABILITY
    )
    slots = torch.arange(2, device=device)
    widths = torch.full((2,), width, device=device)
    sampled = torch.zeros(2, width, dtype=torch.int32, device=device)
    num_sampled = torch.zeros(2, dtype=torch.int32, device=device)
    drafts = torch.zeros(2, width, dtype=torch.int64, device=device)
    middle = torch.full((2,), MAX_STEPS // 2, device=device)
    temperature = rule.temperature(middle, MAX_STEPS, T_MIN, T_MAX)
    one = torch.ones((), device=device)

    def step(logits: Tensor) -> Outcome:
        states.step.fill_(MAX_STEPS // 2)
        states.is_encoder_phase.zero_()
        given = (logits, temperature, width)
        if logits.is_cuda:
            found = builtin.sample_row_stats(*given, 1, weight.dtype)
        else:
            found = builtin.sample_row_stats_reference(*given, weight.dtype)
        argmax, sample, entropy, probs = found
        builtin._compiled_sample_step(
            sample.view(2, width), argmax.view(2, width), entropy.view(2, width),
            probs.view(2, width, -1), slots, slots, slots, widths,
            states.canvas, states.argmax_canvas, states.step, states.is_encoder_phase,
            states.confident, states.self_conditioning_embeds, weight, one,
            states.accepted_canvas_history, states.accepted_canvas_history_len, states.max_steps,
            states.pin_mask, states.seed_canvas, states.read_only, sampled, num_sampled, drafts,
            confidence_threshold=CONFIDENCE, vocab_size=vocab, CL=width, ST=STABILITY,
            entropy_bound=ENTROPY_BOUND, sc_vocab_start=0, sc_vocab_end=vocab, tp_size=1,
            tp_group_name="", compute_sc=True,
        )  # fmt: skip
        return Outcome(argmax, entropy, states.self_conditioning_embeds.view(-1, hidden))

    return step


def _disagree(weight: Tensor, builtin: Outcome, ours: Outcome) -> str:
    """The built-in sums p log p over the whole row in fp32: 1e-3 nats. Soft embeddings may differ
    by what ours leaves out and by the rounding of both, in units of the largest embedding."""
    from dllm.ops.soft_embedding import skipped_mass

    if not torch.equal(ours.argmax, builtin.argmax):
        return "other argmax tokens"
    if not (worst := float((ours.entropy - builtin.entropy).abs().max())) < 1e-3:
        return f"entropies are {worst:.2g} apart"
    allowed = skipped_mass(weight.dtype) + 2 * torch.finfo(weight.dtype).eps
    error = float((ours.soft - builtin.soft).norm(dim=-1).max())
    error /= float(weight.float().norm(dim=-1).max())
    return "" if error <= allowed else f"soft embeddings are {error:.2g} apart; {allowed:.2g}"


# --- table ---------------------------------------------------------------------------------------


def sampling_step(results: Path) -> str:
    """Section of docs/sampling.md: milliseconds and ratios, a line for each shape and profile."""
    return section(results / "sampler_cpu.csv", "python -m bench.kernels sampler", _table)


def _table(rows: Rows) -> str:
    shape_of = ("rows", "vocab_size", "hidden", "profile")
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = []
    for shape in dict.fromkeys(tuple(row[name] for name in shape_of) for row in rows):
        here = [row for row in rows if tuple(row[name] for name in shape_of) == shape]
        times = " / ".join(f"{float(row['p50_ms']):.1f}" for row in here)
        faster = [
            Spread(*(float(row[end]) for end in ("faster", "faster_low", "faster_high"))).text(2)
            for row in here
            if row["implementation"] != BUILTIN
        ]
        lines.append([shape[0], f"{int(shape[1]):,}", *shape[2:], times, *faster])
    compared = [f"built-in / {name}" for name in names if name != BUILTIN]
    return markdown(
        (["rows", "vocabulary", "hidden", "logits", f"ms: {' / '.join(names)}", *compared], lines)
    )
