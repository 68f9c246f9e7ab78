"""Denoise settings for tests: in a checkpoint's two files, and as the object made from them."""

from types import SimpleNamespace

import torch
from torch import nn

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
