"""Runs Hugging Face's DiffusionGemma (transformers 5.19), the reference for ours.

All functions take one sequence, and run in the model's own dtype. `generate_with_noise` calls
Hugging Face's `generate` with its three sources of randomness replaced by ours, so that a whole
generation can be compared token by token:

    initial canvas    EntropyBoundSampler.initialize_canvas, called by _prepare_denoiser_inputs
    sampled tokens    torch.multinomial(softmax(logits / T)), in _denoising_step
    renoise tokens    EntropyBoundSampler.initialize_canvas again, called by renoise_canvas
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler

from dllm.ops import noise
from dllm.ops.row_stats import drawn_tokens, tiles_of


@dataclass
class HFGeneration:
    """The tokens that `generate` produced, and the canvases of every denoise step."""

    tokens: list[int]  # all generated blocks, before end-of-sequence is looked at
    steps_per_block: list[int]
    canvases: list[list[list[int]]] = field(default_factory=list)  # [block][step]: input canvas
    # [block][step]: [C, V], at the temperature of the step
    probs: list[list[Tensor]] = field(default_factory=list, compare=False)


def load_hf(path: str | Path) -> DiffusionGemmaForBlockDiffusion:
    """The reference model of a checkpoint, in fp32, ready to be called."""
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def one_step_logits(
    model: DiffusionGemmaForBlockDiffusion,
    context_ids: Sequence[int],
    canvas_ids: Sequence[int],
    prev_logits: Tensor | None = None,
) -> Tensor:
    """Logits of one denoise step on a canvas after `context_ids`: [C, V] fp32, soft-capped.

    The context is encoded causally, then the canvas decoded at the positions that follow it.
    prev_logits: [C, V], the temperature-scaled logits of the previous step, whose softmax is the
    self-conditioning; None at a block's first step.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    output = model(
        input_ids=torch.tensor([list(context_ids)]),
        past_key_values=cache,
        decoder_input_ids=torch.tensor([list(canvas_ids)]),
        self_conditioning_logits=None if prev_logits is None else prev_logits[None],
    )
    return output.logits[0]


def generate_with_noise(
    model: DiffusionGemmaForBlockDiffusion,
    prompt_ids: Sequence[int],
    num_blocks: int,
    seed: int,
    stop_at_eos: bool = False,
    **generation: Any,
) -> HFGeneration:
    """Hugging Face's `generate` for one prompt, drawing from our noise under `seed`.

    generation: `max_denoising_steps`, `t_min`, `t_max`, `stability_threshold`,
    `confidence_threshold`, `sampler_config`, as `generate` takes them; what is not given comes
    from the checkpoint's generation_config. stop_at_eos: end after a block that holds an
    end-of-sequence token (the block's tokens are returned whole).
    """
    if not stop_at_eos:
        generation["eos_token_id"] = None
    canvas_length = model.config.canvas_length
    with _patched(model, seed) as source:
        output = model.generate(
            torch.tensor([list(prompt_ids)]),
            max_new_tokens=num_blocks * canvas_length,
            pad_token_id=None,  # else what follows an end-of-sequence token is overwritten
            **generation,
        )
    tokens = output.sequences[0, len(prompt_ids) :].tolist()
    steps = [len(canvases) for canvases in source.canvases]
    return HFGeneration(tokens, steps, source.canvases, source.probs)


class _NoiseSource:
    """Makes the random numbers that Hugging Face's loop asks for, with `dllm.ops.noise`.

    They depend on where the loop is: the canvas start, and how many steps are done.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.canvas_start = 0
        self.in_step = False
        self.canvases: list[list[list[int]]] = []
        self.probs: list[list[Tensor]] = []

    def begin_block(self, canvas_start: int) -> None:
        self.canvas_start = canvas_start
        self.canvases.append([])
        self.probs.append([])

    def _place(self) -> tuple[Tensor, Tensor, Tensor]:
        """(seed, canvas start, steps done), each [1] int64."""
        steps_done = len(self.canvases[-1]) - 1 if self.in_step else 0
        place = (self.seed, self.canvas_start, steps_done)
        seed, start, step = (torch.tensor([value]) for value in place)
        return seed, start, step

    def tokens(self, width: int, vocab_size: int) -> Tensor:
        stream = noise.STREAM_RENOISE if self.in_step else noise.STREAM_INITIAL_CANVAS
        return noise.random_tokens(*self._place(), width, vocab_size, stream)

    def sample(self, probs: Tensor) -> Tensor:
        """One token a row, drawn as by `row_stats`: probs [C, V] to [C, 1]."""
        self.probs[-1].append(probs)
        width = len(probs)
        keys = noise.row_keys(*self._place(), width, noise.STREAM_GUMBEL)[0]
        logits = tiles_of(torch.log(probs))
        peak, temperature = torch.zeros(width), torch.ones(width)
        return drawn_tokens(logits, logits.exp().sum(-1), peak, temperature, keys)[:, None]


@contextmanager
def _patched(model: DiffusionGemmaForBlockDiffusion, seed: int) -> Iterator[_NoiseSource]:
    """Replace the random numbers of `model.generate`.

    Two more methods are wrapped to know where the loop is.
    """
    source = _NoiseSource(seed)
    prepare, step = model._prepare_denoiser_inputs, model._denoising_step

    def prepare_denoiser_inputs(decoder_attention_mask: Tensor, **kwargs: Any) -> tuple:
        source.begin_block(decoder_attention_mask.shape[1] - model.config.canvas_length)
        return prepare(decoder_attention_mask=decoder_attention_mask, **kwargs)

    def denoising_step(current_canvas: Tensor, **kwargs: Any) -> tuple:
        source.canvases[-1].append(current_canvas[0].tolist())
        source.in_step = True
        try:
            return step(current_canvas=current_canvas, **kwargs)
        finally:
            source.in_step = False

    def initialize_canvas(self: EntropyBoundSampler, batch_size: int, device: object) -> Tensor:
        assert batch_size == 1, f"one sequence at a time, not {batch_size}"
        return source.tokens(self.canvas_length, self.vocab_size)

    def multinomial(probs: Tensor, num_samples: int) -> Tensor:
        assert num_samples == 1 and source.in_step, (num_samples, source.in_step)
        return source.sample(probs)

    with ExitStack() as stack:
        for target, name, replacement in (
            (model, "_prepare_denoiser_inputs", prepare_denoiser_inputs),
            (model, "_denoising_step", denoising_step),
            (EntropyBoundSampler, "initialize_canvas", initialize_canvas),
            (torch, "multinomial", multinomial),
        ):
            stack.enter_context(patch.object(target, name, replacement))
        yield source
