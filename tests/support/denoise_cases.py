"""One checkpoint's denoising, as its two files say it and as a server holds it."""

from dllm.settings.server import DenoiseConfig

HF_CONFIG = {"canvas_length": 32}
GENERATION = {
    "max_denoising_steps": 16,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.2,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 1.0},
}
CONFIG = DenoiseConfig(
    canvas_length=32,
    max_denoising_steps=16,
    t_min=0.4,
    t_max=0.8,
    entropy_bound=1.0,
    confidence_threshold=0.2,
    stability_threshold=1,
    canvas_window="symmetric",
)
