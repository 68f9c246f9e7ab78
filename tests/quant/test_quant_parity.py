"""Served quantized layers against their definitions in numpy, and the model against Hugging Face.

Four engines, one for each scheme and layout. Random weights in fp32, so that nothing but rounding
stands between two right answers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from vllm import SamplingParams

from dllm.models import quantized
from tests.engine.test_parity import prompt
from tests.support import hf_reference, quant_reference
from tests.support.engine_harness import DenoiseStep, Engine, get_engine
from tests.support.quant_checkpoints import (
    DECODER,
    ENCODER_ONLY,
    OURS,
    REDHAT,
    Layout,
    dequantize,
    dequantized,
    layers_of,
    write_quantized,
)
from tests.support.quant_reference import PASSES_APART, Lockstep, Recording, relative

CONTEXT = prompt(40)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Sums of fp32 products in another order; 4e-7 was measured.
SUM_TOLERANCE = 1e-5
# One of 32 inputs by one step of the format, an eighth of it at most.
ONE_CODE = 0.125 / 32**0.5
# As in test_parity.
LOGIT_TOLERANCE = 1e-4


@dataclass
class Served:
    """An engine, what it was made of, and its first two passes: the prompt and a canvas."""

    scheme: str
    path: Path
    source: Path
    engine: Engine
    log: str
    recording: Recording
    step: DenoiseStep


CASES: dict[str, tuple[str, Layout]] = {
    "fp8-dynamic": ("fp8-dynamic", OURS),
    "nvfp4": ("nvfp4", REDHAT),
    "nvfp4a16, attention of full layers as it was": ("nvfp4a16", REDHAT),
    "int8-dynamic": ("int8-dynamic", ENCODER_ONLY),
}


@pytest.fixture(scope="module", params=list(CASES))
def served(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Served:
    """A quantized checkpoint that has answered one request, every layer watched."""
    scheme, layout = CASES[request.param]
    keep = (lambda name: ".layers.1.self_attn." in name) if "," in request.param else None
    source = checkpoint()
    path = tmp_path_factory.mktemp("quantized") / "model"
    write_quantized(source, path, scheme, layout, keep=keep)
    lines: list[str] = []
    with patch.object(quantized.logger, "info", lambda text, *args: lines.append(text % args)):
        engine = get_engine(path, max_num_batched_tokens=256, additional_config=PASSES_APART)
    recording = Recording(engine.runner.model)
    with engine.watch(keep_logits=True) as steps:
        engine.generate([CONTEXT], SamplingParams(max_tokens=1, seed=5, ignore_eos=True))
    recording.stop()
    step = next(iter(steps.values()))[0]
    return Served(scheme, path, source, engine, "\n".join(lines), recording, step)


@torch.no_grad()
def test_every_linear_layer_is_its_definition(served):
    """Quantize the inputs, multiply by the dequantized weight: each layer on what it really saw."""
    layers = layers_of(served.path)
    assert len(served.recording.linears) == 4 * 4
    for name, passes in served.recording.linears.items():
        stem, _, last = (DECODER + name.removeprefix("model.")).rpartition(".")
        parts = [
            # Full layers have no v_proj: their values are their keys.
            layers.get(f"{stem}.{part}", layers[f"{stem}.k_proj"] if part == "v_proj" else None)
            for part in FUSED.get(last, (last,))
        ]
        for inputs, output in passes[:2]:
            expected = [
                quant_reference.rounding_of(part)(inputs).double() @ weight_of(part).T
                for part in parts
            ]
            assert relative(output, torch.cat(expected, dim=-1).float()) < SUM_TOLERANCE, name


def weight_of(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return (parts["weight"] if len(parts) == 1 else dequantize(parts)).double()


@torch.no_grad()
def test_every_expert_layer_is_its_definition(served):
    """Row by row: what the down projection sees is a sum, which may lie at a tie between codes."""
    reference = quant_reference.load_quantized(served.source, served.path)
    assert len(served.recording.experts) == 4
    for index, passes in enumerate(served.recording.experts.values()):
        experts = reference.model.decoder.layers[index].experts
        for tokens, weights, ids, output in passes[:2]:
            expected = experts.forward(tokens, ids.long(), weights)
            off = (output - expected).norm(dim=1) / expected.norm(dim=1)
            assert off.quantile(0.95) < SUM_TOLERANCE, index
            assert off.max() < ONE_CODE, index


def test_emulated_weights_are_the_dequantized_ones(served):
    """Within the rounding of their dtype, which is fp32 here."""
    weights = dequantized(served.path)
    compared = 0
    for name, module in served.engine.runner.model.named_modules():
        stem, _, last = (DECODER + name.removeprefix("model.")).rpartition(".")
        pairs = []
        if last == "routed_experts":
            pairs = [
                (module.experts.gate_up, weights[f"{stem}.gate_up_proj"]),
                (module.experts.down, weights[f"{stem}.down_proj"]),
            ]
        elif hasattr(module, "parts"):
            parts = [weights.get(f"{stem}.{part}.weight") for part in FUSED.get(last, (last,))]
            keys = weights.get(f"{stem}.k_proj.weight")
            whole = torch.cat([keys if part is None else part for part in parts])
            pairs = [(module.weight, whole)]
        for ours, expected in pairs:
            eps = torch.finfo(torch.float32).eps
            assert torch.allclose(ours, expected, rtol=4 * eps, atol=0), name
        compared += len(pairs)
    # NVFP4: also the four linear layers of every layer that is quantized, all or all but two.
    linears = {"nvfp4": 16, "nvfp4a16": 14}.get(served.scheme, 0)
    assert compared == 4 * 2 + linears


@torch.no_grad()
def test_one_step_logits_against_hugging_face(served):
    """The whole model under the same canvas.

    NVFP4 has so few codes that the rounding of fp32 sums reaches none of them. 8 bits are compared
    in lockstep, which says why: what each layer makes of its inputs is the subject of the two tests
    above, and here these inputs are.
    """
    is_free = served.scheme.startswith("nvfp4")
    model = quant_reference.load_quantized(served.source, served.path, rounds_inputs=is_free)
    lockstep = None if is_free else Lockstep(model, served.recording)
    expected = hf_reference.one_step_logits(model, CONTEXT, served.step.canvas)
    assert relative(served.step.logits, expected) < LOGIT_TOLERANCE
    if lockstep is not None:
        # Both halves, 4 layers: projections of attention and MLP, experts. Full ones lack v_proj.
        assert len(lockstep.distances) == 2 * (4 * 8 - 2)
        assert max(lockstep.distances.values()) < LOGIT_TOLERANCE


def test_the_log_says_what_computes(served):
    (line,) = [line for line in served.log.splitlines() if "checkpoint;" in line]
    is_native = served.scheme in ("fp8-dynamic", "int8-dynamic")
    kinds = "linear layers: " if is_native else "linear layers and experts: "
    assert line.startswith(f"dllm: {served.scheme} checkpoint; {kinds}")
    assert "emulated" in line.partition("experts: ")[2]
    assert ("ScaledMM" in line.partition("experts: ")[0]) == is_native
