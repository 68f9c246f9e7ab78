"""Our attention backend under vLLM's real engine, its kernel in Triton's interpreter."""

import subprocess
import sys
from pathlib import Path

import hf_reference
import pytest
import torch

CANVAS, WINDOW = 12, 16
WORKER = Path(__file__).with_name("attention_backend_worker.py")


@pytest.fixture(scope="module")
def engine_run(checkpoint, tmp_path_factory):
    path = checkpoint(canvas_length=CANVAS, sliding_window=WINDOW, canvas_window="anchored")
    output = tmp_path_factory.mktemp("backend") / "run.pt"
    subprocess.run(
        [sys.executable, str(WORKER), str(path), str(output)],
        check=True,
        timeout=300,
        cwd=WORKER.parent.parent,
        capture_output=True,
    )
    return path, torch.load(output)


def test_generations_equal_hugging_face(engine_run):
    path, run = engine_run
    model = hf_reference.load_hf(path)
    for prompt, tokens, seed in zip(run["prompts"], run["tokens"], (1, 2), strict=True):
        assert tokens == hf_reference.generate_with_noise(model, prompt, 2, seed=seed).tokens


def test_first_step_logits_equal_hugging_face(engine_run):
    """Tokens of random weights are robust; logits are not."""
    path, run = engine_run
    model = hf_reference.load_hf(path)
    for prompt, logits, seed in zip(run["prompts"], run["logits"], (1, 2), strict=True):
        canvas = hf_reference.generate_with_noise(model, prompt, 1, seed=seed).canvases[0][0]
        reference = hf_reference.one_step_logits(model, prompt, canvas)
        error = (logits[:CANVAS] - reference).abs().max() / reference.abs().max()
        assert error < 1e-4  # fp32 sums in another order; see test_parity.py


def test_one_pass_mixed_every_kind_of_row(engine_run):
    _, run = engine_run
    kinds = {kind for kind, _, _ in run["calls"]}
    assert kinds == {"anchored", None}  # sliding and full layers
    splits = [tuple(points) for _, points, _ in run["calls"]]
    assert any(0 in points and CANVAS in points for points in splits), "no head beside a canvas"
    assert any(37 in points for points in splits), "no prompt"
