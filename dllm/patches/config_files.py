"""Lets vLLM read config.json files that transformers does not know, without remote code."""

from dllm.models import FAMILIES, WITHOUT_CACHE, load
from dllm.patches.neighbours import refuse_model_type


def read_config_files() -> None:
    """Register the config classes of our families, and say why other models are refused."""
    from transformers import AutoConfig

    for served in FAMILIES.values():
        if served.config is not None:
            config = load(served.config)
            AutoConfig.register(config.model_type, config, exist_ok=True)
    for model_type, models in WITHOUT_CACHE.items():
        refuse_model_type(
            model_type,
            f"in {models} each token sees the whole sequence in every step, so no KV cache "
            f"could be kept. Allowed: the architectures {', '.join(FAMILIES)}.",
        )
