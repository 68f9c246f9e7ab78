"""How long a command may take, and what it needs, is said before it begins."""

from types import SimpleNamespace

import pytest
import torch

from dllm.prompts.files import BUNDLED
from dllm.settings.command import CommandError
from dllm.train import responses
from dllm.train.responses import Prompt
from dllm.train.target import read_config
from tests.support.clock import Clock

PROMPTS = [Prompt((1, 2), "group", False)] * 100


@pytest.mark.parametrize(("seconds", "minutes"), [(0.8, "21 minutes"), (0.001, "")])
def test_responses_say_how_long_they_may_take(monkeypatch, capsys, seconds, minutes):
    clock = Clock()
    monkeypatch.setattr(responses.time, "monotonic", clock)

    def respond(asked, max_tokens, temperature, seed):
        assert len(asked) == 16
        clock.now += max_tokens * seconds

    model = SimpleNamespace(parameters=lambda: [torch.zeros(1000, 1000)])
    target = SimpleNamespace(respond=respond, model=model)
    responses.say_how_long(target, PROMPTS, 224, 16)
    said = capsys.readouterr().out
    assert minutes in said and bool(minutes) == ("4.0 MB" in said)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("org/name", "there is no folder"),
        ("checkpoints/tiny-sdar", "a diffusion model (SDARForCausalLM)"),
    ],
)
def test_a_target_that_has_no_drafter_is_refused(folder, message):
    with pytest.raises(CommandError) as refused:
        read_config(BUNDLED.parents[2] / folder)
    assert message in str(refused.value)
