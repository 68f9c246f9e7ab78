"""What Inductor makes of our functions for a GPU, in Triton's interpreter, beside the functions.

``test_inductor.py`` runs it in a process of its own.
"""

import pytest
import torch

from dllm.ops import noise
from tests.support import inductor_interpreter

WIDTH, VOCAB = 32, 832


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> None:
    inductor_interpreter.install()


def test_noise_is_the_same_to_the_bit():
    """Seeds and positions of any size: of step noise, and of first canvases."""
    seeds = torch.tensor([5, -7, 2**62 + 12345, 3])
    starts, steps = torch.tensor([0, 64, 4096, 77]), torch.tensor([0, 3, 47, 1])

    def drawn(seeds: torch.Tensor, starts: torch.Tensor, steps: torch.Tensor) -> list[torch.Tensor]:
        of_step = noise.step_noise(seeds, starts, steps, WIDTH, VOCAB)
        first = noise.initial_canvas(seeds, starts, WIDTH, VOCAB)
        return [of_step.keys, of_step.renoise_tokens, first]

    compiled = torch.compile(drawn, dynamic=True)
    for found, expected in zip(
        compiled(seeds, starts, steps), drawn(seeds, starts, steps), strict=True
    ):
        assert torch.equal(found, expected)
