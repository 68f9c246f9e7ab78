"""Server-level configuration from plain mappings: what it accepts, and every refusal.

``test_startup.py`` checks that the same rules hold through vLLM's own arguments.
"""

import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from dllm.models.gemma.settings import GemmaSettings
from dllm.settings.checks import missing_folder
from dllm.settings.server import PluginOptions, options_of
from tests.support.denoise_cases import CONFIG, GENERATION, HF_CONFIG

INTEGERS = {"canvas_length": 1, "max_denoising_steps": 1, "stability_threshold": 0}
FLOATS = ("t_min", "t_max", "confidence_threshold", "entropy_bound")


def mappings(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two files of a good checkpoint with some values changed; ``...`` removes a key."""
    hf_config: dict[str, Any] = dict(HF_CONFIG)
    generation: dict[str, Any] = GENERATION | {"sampler_config": dict(GENERATION["sampler_config"])}
    for key, value in changes.items():
        where = generation
        if key in ("canvas_length", "canvas_window"):
            where = hf_config
        elif key == "entropy_bound":
            where = generation["sampler_config"]
        if value is ...:
            where.pop(key)
        else:
            where[key] = value
    return hf_config, generation


def config(**changes: Any) -> GemmaSettings:
    return GemmaSettings.from_mappings(*mappings(**changes))


def refusal(**changes: Any) -> str:
    """The message with which the mappings are refused."""
    with pytest.raises(ValueError) as error:
        config(**changes)
    return str(error.value)


def test_every_field_comes_from_the_files():
    assert config() == CONFIG


@pytest.mark.parametrize("key", [*INTEGERS, *FLOATS, "sampler_config"])
@pytest.mark.parametrize("value", [..., None], ids=["absent", "null"])
def test_a_missing_key_is_named_with_what_to_do(key, value):
    message = refusal(**{key: value})
    assert key in message
    if key != "sampler_config":
        assert f"{key} is missing" in message
        flags = {
            "canvas_length": """--hf-overrides '{"canvas_length": ...}'""",
            "entropy_bound": """-config '{"sampler_config": {"entropy_bound": ...}}'""",
        }
        default = f"""--override-generation-config '{{"{key}": ...}}'"""
        assert flags.get(key, default) in message


@pytest.mark.parametrize(
    "value", [0, 7, "EntropyBound", {}, {"entropy_bound": 1.0}, {"_cls_name": "TopKSampler"}]
)
def test_another_sampler_is_refused(value):
    message = refusal(sampler_config=value)
    assert f"sampler_config = {value!r}" in message and "EntropyBound" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, x) for key in (*INTEGERS, *FLOATS) for x in (-1, True, "4", [4], math.nan)),
        *((key, 1.0) for key in INTEGERS),
        *((key, x) for key in FLOATS for x in (math.inf, -math.inf, 2**70)),
        *((key, 0) for key in ("t_min", "t_max", "entropy_bound")),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(key, value):
    assert f"{key} = {value!r}; allowed: " in refusal(**{key: value})


def test_the_smallest_values_are_accepted():
    smallest = config(
        **INTEGERS, t_min=1e-4, t_max=1e-4, entropy_bound=1e-9, confidence_threshold=0
    )
    assert smallest.confidence_threshold == 0 and smallest.stability_threshold == 0


def test_the_schedule_runs_downwards():
    assert "t_min = 0.9 must not exceed t_max = 0.8" in refusal(t_min=0.9)
    assert config(t_min=0.8).t_min == 0.8


@pytest.mark.parametrize(
    ("value", "window"),
    [(None, "symmetric"), ("auto", "symmetric"), ("symmetric",) * 2, ("anchored",) * 2],
)
def test_canvas_window(value, window):
    assert config(canvas_window=value).canvas_window == window


@pytest.mark.parametrize("value", ["Anchored", "causal", 3, True])
def test_another_canvas_window_is_refused(value):
    assert f"canvas_window = {value!r}; allowed: 'symmetric'" in refusal(canvas_window=value)


# --- the plugin's own options ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_config", [None, {}, {"other": {"x": 1}}, {"dllm": {}}, {"dllm": None}, "text"]
)
def test_without_options_the_defaults_hold(given_config):
    assert PluginOptions.from_additional_config(given_config) == PluginOptions()


CHOICES = {
    "context_cache": ("none", "block"),
    "soft_embedding": ("auto", "sparse", "exact"),
}


@pytest.mark.parametrize(("key", "value"), [(key, x) for key in CHOICES for x in CHOICES[key]])
def test_a_choice(key, value):
    options = PluginOptions.from_additional_config({"dllm": {key: value}, "other": 1})
    assert getattr(options, key) == value
    assert getattr(PluginOptions(), key) == CHOICES[key][0]


def test_options_are_parsed_once_for_a_configuration(monkeypatch):
    server = SimpleNamespace(additional_config={"dllm": {"self_test": False}})
    assert not options_of(server).self_test
    parse = PluginOptions.from_additional_config
    monkeypatch.setattr(PluginOptions, "from_additional_config", None)  # whoever calls it fails
    assert options_of(server) is options_of(server)
    monkeypatch.setattr(PluginOptions, "from_additional_config", parse)
    assert set(vars(server)) == {"additional_config"}  # vLLM copies configurations by their fields
    assert options_of(pickle.loads(pickle.dumps(server))) == options_of(server)
    server.additional_config = {}
    assert options_of(server).self_test


def test_a_model_name_that_is_a_path_or_may_be_one_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "models" / "file.gguf").touch()
    for fine in ("models/small", "models/file.gguf", "org/name", "name", f"{tmp_path}/models"):
        assert missing_folder(fine) is None
    assert missing_folder("models/smal", may_be_of_hub=True) is None
    assert missing_folder("./models/smal", may_be_of_hub=True) == missing_folder("models/smal")
    for wrong in ("models/smal", "./models/smal", f"{tmp_path}/models/smal/deeper"):
        assert "models/smal (did you mean 'small'?); in " in (missing_folder(wrong) or "")
    assert "/models: small." in (missing_folder(f"{tmp_path}/models/unlike") or "")
