"""Small trainings of a drafter: a random target, prompts in a file, a few steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm.drafter.checkpoint import DrafterConfig
from dllm.drafter.samples import Sample
from dllm.settings.drafting import DrafterOptions
from dllm.train.export import Drafter
from dllm.train.run import DraftLearner, Run
from dllm.train.settings import DrafterTraining
from dllm.train.target import Target
from tests.support.drafter_pairs import MASK, drafter_config, write_target

PROMPTS = [f"Sort these numbers: {n}, {97 - n}, {n + 1}." for n in range(14)]

TOML = f"""
steps = 4
batch_size = 4
anchors = 4
responses = 10
heldout = 4
max_tokens = 12
generate_batch = 4
evaluate_every = 2
checkpoint_every = 2
[drafter]
num_layers = 1
block_size = 4
target_layer_ids = [1, 3]
mask_token_id = {MASK}
"""


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of four layers with a tokenizer."""
    return write_target(tmp_path_factory.mktemp("calibrate") / "target")


@pytest.fixture(scope="module")
def target(target_path: Path) -> Target:
    return Target(target_path, "cpu")


def read_config(**overrides: Any) -> DrafterConfig:
    """A drafter of ``drafter_pairs``."""
    return DrafterConfig.from_config(drafter_config(**overrides), DrafterOptions())


def small_settings(**more: Any) -> DrafterTraining:
    few = dict(steps=6, batch_size=4, anchors=4, evaluate_every=3, checkpoint_every=3)
    return DrafterTraining(**(few | dict(warmup_steps=2) | more))


def random_samples(target: Target, count: int, length: int = 14) -> list[Sample]:
    """Greedy responses to random prompts of 5 tokens and more."""
    draw = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(20, 450, (5 + at % 3,), generator=draw).tolist() for at in range(count)
    ]
    responses = target.respond(prompts, length, 0.0, 0)
    pairs = zip(prompts, responses, strict=True)
    return [Sample((*prompt, *said), len(prompt), "all") for prompt, said in pairs]


def new_drafter(**overrides: Any) -> Drafter:
    """A drafter of one layer, with blocks of four, whose weights are to be drawn."""
    config = drafter_config(num_hidden_layers=1, **overrides)
    return Drafter(config, read_config(num_hidden_layers=1, **overrides), 4, None)


def calibration(
    target: Target, samples: list[Sample], out: Path, settings: DrafterTraining, **overrides: Any
) -> Run:
    """A run on these samples, which are the held-out ones, too."""
    out.mkdir(exist_ok=True)
    return Run(DraftLearner(settings, new_drafter(**overrides), target, samples, samples), out)


def weights_of(run: Run) -> dict[str, Tensor]:
    """The weights of the network and of its average."""
    network = {f"network {name}": tensor for name, tensor in run.model.state_dict().items()}
    return network | {
        f"average {name}": tensor for name, tensor in run.average.state_dict().items()
    }
