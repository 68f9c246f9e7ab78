"""Denoise settings for tests, in a checkpoint's files and as an object; canvases of no batch."""

from types import SimpleNamespace

import torch
from torch import nn

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.state import NO_THOUGHT
from dllm.engine.thoughts import Thoughts
from dllm.models.gemma.algorithm import EntropyBound
from dllm.models.gemma.settings import GemmaSettings

HF_CONFIG = {"canvas_length": 32}
GENERATION = {
    "max_denoising_steps": 16,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.2,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 1.0},
}
CONFIG = GemmaSettings(
    canvas_length=32,
    max_denoising_steps=16,
    t_min=0.4,
    t_max=0.8,
    entropy_bound=1.0,
    confidence_threshold=0.2,
    stability_threshold=1,
    canvas_window="symmetric",
)


def family(settings: GemmaSettings, vocab_size: int, hidden_size: int = 4) -> EntropyBound:
    """A DiffusionGemma family without a model: all of a denoise step except self-conditioning."""
    embedding = SimpleNamespace(embedding_dim=hidden_size)
    return EntropyBound(
        settings, vocab_size, torch.float32, nn.Identity(), embedding, torch.ones(())
    )


def whole_canvases(starts: torch.Tensor, canvas_length: int) -> CanvasRows:
    """Of full width, canvas i in slot i; ``starts``: ``[R]`` int64."""
    num_rows = len(starts)
    places = torch.arange(num_rows * canvas_length)
    return CanvasRows(
        slots=torch.arange(num_rows),
        widths=torch.full_like(starts, canvas_length),
        starts=starts,
        seq_lens=starts + canvas_length,
        request_of=places // canvas_length,
        place=places % canvas_length,
        padded=places.view(num_rows, canvas_length),
    )


def no_thoughts(count: int) -> Thoughts:
    """Of so many requests without a budget."""
    given = {name: torch.full((count,), value) for name, value in NO_THOUGHT.items()}
    starts = torch.zeros(count, dtype=torch.int64)
    return Thoughts(canvas_start=starts, is_asked=torch.tensor(False), **given)
