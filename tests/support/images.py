"""Checkpoints with a vision tower, pictures, and the process that can read them.

The set-up has torchvision in a folder of its own, off Python's path, so that everything else is
tested without it.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.toys.tiny import tiny_config
from tests.support.process import ROOT, python_path

IMAGE_TOKEN = 8  # the placeholder of an image in a prompt
TORCHVISION = Path(sys.prefix) / "torchvision"  # the Makefile's
# A tower for the smallest budget that the processor knows, 70 soft tokens an image: 280 patches,
# at worst in two rows of 140.
VISION = tiny_config()["vision_config"] | {
    "default_output_length": 70,
    "position_embedding_size": 140,
}
WITH_TOWER = dict(vision_config=VISION, use_bidirectional_attention="vision", image_processor=True)

needs_torchvision = pytest.mark.skipif(
    not TORCHVISION.exists() and importlib.util.find_spec("torchvision") is None,
    reason=f"needs torchvision in {TORCHVISION} (make test-all installs it)",
)


def picture(seed: int, height: int = 40, width: int = 60) -> Image.Image:
    """A few large patches of colour; 54 soft tokens in this shape, 60 at 30 x 90."""
    pixels = np.random.default_rng(seed).integers(0, 256, (2, 3, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)


def path_with_torchvision() -> str:
    """PYTHONPATH of a process that can import torchvision."""
    stub = ROOT / "tests/support/torchvision_without_ops"
    return python_path(stub, TORCHVISION, ROOT)
