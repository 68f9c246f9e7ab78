"""Lets vLLM read config.json files that transformers does not know, without remote code."""

from typing import Any

from dllm.models import FAMILIES, REFUSED, load


def read_config_files() -> None:
    """Add the config classes of our families to vLLM's, and say why other models are refused."""
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for served in FAMILIES.values():
        if served.config is not None:
            config = load(served.config)
            _CONFIG_REGISTRY[config.model_type] = config
    for model_type, why in REFUSED.items():
        _CONFIG_REGISTRY[model_type] = _refusing(model_type, why)


def _refusing(model_type: str, why: str) -> Any:
    """A config class that cannot be made; the server stops at start with the reason."""
    from transformers import PreTrainedConfig

    def refuse(cls: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{model_type} is not served. {why}.")

    return type("Refused", (PreTrainedConfig,), {"from_dict": classmethod(refuse)})
