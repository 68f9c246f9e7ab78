"""Config files of released models (``tests/models/released``), each with its source."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RELEASED = Path(__file__).parents[1] / "models/released"
GEMMA = "diffusiongemma-26b-a4b-it"


def released(name: str) -> dict[str, Any]:
    """The fixture of that name: ``config``, ``generation_config`` and others, as JSON."""
    fixture: dict[str, Any] = json.loads((RELEASED / f"{name}.json").read_text())
    return fixture


def write_configs(
    path: Path, name: str, quantization_config: Mapping[str, Any] | None = None, **changes: Any
) -> Path:
    """A folder with the config files of a released model, without weights and tokenizer.

    Args:
        quantization_config: added to config.json.
        changes: of fields of config.json.
    """
    fixture = released(name)
    config = fixture["config"] | changes
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(fixture.get("generation_config", {})))
    return path
