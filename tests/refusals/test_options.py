"""Values that options of a server may not have: (options, what the message holds).

Those that do not fit a checkpoint, a flag or each other's mechanism are in ``test_start``.
"""

import math
from typing import Any

import pytest

from dllm.settings.drafting import DrafterOptions
from dllm.settings.remote import RemoteOptions
from dllm.settings.server import WHERE, PluginOptions

WORKER = "unix:///drafts/worker.sock"
OF_SERVER: list[tuple[Any, list[str]]] = [
    *(({"context_cache": value},
       [f"{WHERE}: context_cache = {value!r}; allowed: 'none' or 'block'."])
      for value in ("Block", "", None, 1, ["block"])),
    *((value, [f"{WHERE}: "]) for value in (["decoding"], "text", 3)),
    ({"decodin": 1}, [f"{WHERE}: no option 'decodin' (did you mean 'decoding'?); known: "]),
    ({"zzz": 1}, [f"{WHERE}: no option 'zzz'; known: "]),
    *(({"denoise_loop_ms": value}, [f"denoise_loop_ms = {value!r}; allowed: ", " or 'auto'"])
      for value in (-1, math.nan, "5", True, 60_001, "Auto", "never", None)),
    *(({"logits_workspace_mib": value}, ["logits_workspace_mib = ", "allowed: ", " or 'auto'"])
      for value in (0, -1, 1.5, True, "1")),
    ({"decisions": {"temperature": {"score": 0}}}, ["decisions.temperature = 0; allowed: "]),
    ({"decisions": {"temperature": {"scale": 1}}}, ["decisions.temperature = 'scale'; "]),
    ({"drafter": None}, ["drafter = None; allowed: "]),
    ({"remote": 5}, ["remote = 5"]),
]  # fmt: skip
OF_DRAFTER: list[tuple[Any, list[str]]] = [
    ("fixed", ["drafter = 'fixed'"]),
    ({"polcy": "fixed"}, ["drafter has no option 'polcy' (did you mean 'policy'?)"]),
    ({"policy": "adaptve"}, ["adaptve", "adaptive"]),
    ({"policy": "adaptive", "width": 3}, ["width = 3", '"fixed"', '"adaptive"']),
    ({"policy": "fixed", "prompt_lookup": True}, ["prompt_lookup"]),
    ({"prompt_lookup": 1}, ["prompt_lookup = 1"]),
    ({"width": -1}, ["width = -1"]),
    ({"width": True}, ["width = True"]),
    ({"window": 0}, ["window = 0"]),
    ({"mask_token_id": -1}, ["mask_token_id = -1"]),
    ({"mask_token_id": True}, ["mask_token_id = True"]),
    ({"record": 3}, ["record = 3"]),
    ({"record": "x", "record_mb": 0}, ["record_mb = 0"]),
    ({"denoise_steps": 0}, ["denoise_steps = 0"]),
    ({"noise_schedule": "cubic"}, ["noise_schedule = 'cubic'"]),
    ({"record_dir": "x"}, ["did you mean 'record'?"]),
    ({"record_layers": [1]}, ["record_layers", '"record"']),
    ({"noise_schedule": "sqrt"}, ["noise_schedule", "denoise_steps"]),
    ({"record": "x", "record_layers": [3, 1]}, ["[3, 1]; allowed: ascending"]),
    ({"record": "x", "record_layers": [-1, 1]}, ["record_layers = -1"]),
]
OF_REMOTE: list[tuple[Any, list[str]]] = [
    ({"workers": [WORKER, WORKER]}, ["each address once"]),
    ({"workers": WORKER}, ["workers = "]),
    ({"workers": [{}]}, ["workers = "]),
    ({"workers": []}, ["workers = []", "discovery = 'static'"]),
    ({"workers": [WORKER], "fallback": "ngram"}, ["'fallback'"]),
    ({"workers": [WORKER], "polcy": "fixed"}, ["'polcy'", "did you mean 'policy'"]),
    ({"policy": "widest"}, ["policy = 'widest'", "'adaptive'"]),
    ({"policy": "adaptive", "width": 3}, ["width belongs"]),
    ({"policy": "fixed", "width": -1}, ["width = -1"]),
    ({"deadline_ms": 0}, ["deadline_ms = 0"]),
    ({"deadline_ms": math.nan}, ["deadline_ms"]),
    ({"keys": 5}, ["keys = 5"]),
    ({"discovery": "etcd"}, ["discovery = 'etcd'", "'static'"]),
    ({"discovery": "dynamo", "workers": [WORKER]}, ["which finds them", WORKER]),
]
OPTIONS = [
    *OF_SERVER,
    *(({"drafter": given}, said) for given, said in OF_DRAFTER),
    *(({"remote": given}, said) for given, said in OF_REMOTE),
]


def assert_says(error: Any, said: list[str]) -> None:
    assert all(words in str(error.value) for words in said), error.value


@pytest.mark.parametrize(("given", "said"), OPTIONS)
def test_of_the_plugin(given: Any, said: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        PluginOptions.from_additional_config({"dllm": given})
    assert_says(error, said)


# (options, drafts in a block, whether vLLM chooses how many are verified, what the message holds)
AGAINST: list[tuple[Any, int, bool, list[str]]] = [
    (DrafterOptions(width=8), 7, False, ["width = 8; allowed: 0 to 7"]),
    (DrafterOptions(policy="adaptive"), 7, True, ["adaptive", "enable_adaptive_verification"]),
    (DrafterOptions(width=3), 7, True, ["width = 3", "enable_adaptive_verification"]),
    (DrafterOptions(denoise_steps=8), 7, False,
     ["denoise_steps = ", "num_speculative_tokens is 7"]),
    (DrafterOptions("pilot", pilot="x", denoise_steps=2), 7, False, ["denoise_steps", "'pilot'"]),
    (DrafterOptions(verification="rejection", denoise_steps=2), 7, False,
     ["denoise_steps = ", "verification = 'rejection'"]),
    (DrafterOptions(denoise_steps=2), 7, True, ["denoise_steps", "enable_adaptive_verification"]),
    (RemoteOptions([WORKER], policy="fixed", width=6), 5, False, ["0 to 5"]),
    (RemoteOptions([WORKER]), 128, False, ["num_speculative_tokens = 128; allowed: at most 127"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "num_drafts", "is_trimmed", "said"), AGAINST)
def test_beside_a_number_of_drafts(given, num_drafts, is_trimmed, said) -> None:
    with pytest.raises(ValueError) as error:
        if isinstance(given, RemoteOptions):
            given.check_against(num_drafts)
        else:
            given.check_against(num_drafts, is_trimmed)
    assert_says(error, said)


def test_what_fits_a_number_of_drafts_is_not_refused() -> None:
    DrafterOptions().check_against(7, is_trimmed_by_vllm=True)
    DrafterOptions(denoise_steps=7).check_against(7, is_trimmed_by_vllm=False)
    RemoteOptions([WORKER]).check_against(127)


@pytest.mark.parametrize("given", [{"denoise_loop_ms": 7.5}, {"logits_workspace_mib": 7}])
def test_a_number_in_the_place_of_auto_is_read(given: dict[str, float]) -> None:
    ((name, value),) = given.items()
    assert getattr(PluginOptions.from_additional_config({"dllm": given}), name) == value
