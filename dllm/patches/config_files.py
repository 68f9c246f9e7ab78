"""Lets vLLM read config.json files that transformers does not know, without remote code."""

from typing import Any

from dllm.models import FAMILIES, WITHOUT_CACHE, load


def read_config_files() -> None:
    """Add the config classes of our families to vLLM's, and say why other models are refused."""
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for served in FAMILIES.values():
        if served.config is not None:
            config = load(served.config)
            _CONFIG_REGISTRY[config.model_type] = config
    for model_type, models in WITHOUT_CACHE.items():
        _CONFIG_REGISTRY[model_type] = _refusing(model_type, models)


def _refusing(model_type: str, models: str) -> Any:
    """A config class that cannot be made; the server stops at start with the reason."""
    from transformers import PreTrainedConfig

    def refuse(cls: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"config.json: model_type = {model_type!r} ({models}) is not served: each token sees "
            "the whole sequence in every step, so no KV cache could be kept. Allowed: the "
            f"architectures {', '.join(FAMILIES)}."
        )

    return type("Refused", (PreTrainedConfig,), {"from_dict": classmethod(refuse)})
