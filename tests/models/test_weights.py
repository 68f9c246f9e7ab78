"""Checkpoints: how names and copies are merged, and what stops a server at start."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from dllm.models.gemma import weights as weights_module
from dllm.models.gemma.weights import (
    CANVAS_SCALARS,
    DECODER,
    ENCODER,
    HEAD_SCALARS,
    LayerScalars,
    checkpoint_names,
    merge_shared_copies,
)
from dllm.models.quantized import finite
from tests.engine.test_parity import CANVAS, prompt
from tests.support.edited import WEIGHTS, edited, with_fields
from tests.support.engine_harness import Engine, get_engine
from tests.support.recorded_calls import record_calls
from tests.support.watched_device import DeviceWatch, off_device, on_device

LAYERS = 3


def merged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The merged stream as a dictionary; a name that comes twice fails."""
    pairs = list(merge_shared_copies(weights.items(), LayerScalars(LAYERS)))
    assert len({name for name, _ in pairs}) == len(pairs), "a name came twice"
    return dict(pairs)


def shared(merged_weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the two stacks of layer scalars."""
    stacks = (HEAD_SCALARS, CANVAS_SCALARS)
    return {name: tensor for name, tensor in merged_weights.items() if name not in stacks}


# --- one copy or two -----------------------------------------------------------------------------


@pytest.mark.parametrize("half", [ENCODER, DECODER])
def test_a_single_copy_gets_the_decoders_name(half):
    tensor = torch.randn(4, 6)
    result = shared(merged({f"{half}layers.0.mlp.up_proj.weight": tensor}))
    assert list(result) == [f"{DECODER}layers.0.mlp.up_proj.weight"]
    assert next(iter(result.values())) is tensor


@pytest.mark.parametrize("halves", [(ENCODER, DECODER), (DECODER, ENCODER)])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(8, 16),
        torch.randn(8, 16).bfloat16(),
        torch.randn(8, 16).to(torch.float8_e4m3fn),
        torch.randn(16, 8).T,  # not contiguous
        torch.tensor(3.0),
        torch.zeros(0, 4),
        torch.tensor([float("nan"), 1.0]),
    ],
    ids=["fp32", "bf16", "fp8", "transposed", "scalar", "empty", "nan"],
)
def test_two_copies_that_agree_are_one(halves, tensor):
    result = shared(merged({f"{half}norm.weight": tensor.clone() for half in halves}))
    assert list(result) == [f"{DECODER}norm.weight"]


def swap(tensor: torch.Tensor) -> torch.Tensor:
    """Two neighbours change places: no sum, no XOR of the elements sees it."""
    changed = tensor.clone()
    changed.view(-1)[:2] = tensor.view(-1)[:2].flip(0)
    return changed


def lowest_bit(tensor: torch.Tensor) -> torch.Tensor:
    """The last bit of the last element."""
    changed = tensor.clone()
    changed.view(-1).view(torch.int32)[-1] ^= 1
    return changed


@pytest.mark.parametrize(
    "change",
    [
        swap,
        lowest_bit,
        lambda tensor: tensor.roll(1, 0),
        lambda tensor: tensor.bfloat16().float(),
        lambda tensor: tensor.half(),
        lambda tensor: tensor.reshape(8, 32),
        lambda tensor: tensor.T.contiguous(),
        lambda tensor: torch.cat([tensor, tensor[:1]]),
    ],
    ids=["swap", "bit", "rolled", "rounded", "dtype", "shape", "transposed", "longer"],
)
def test_every_difference_is_noticed(change):
    tensor = torch.randn(16, 16)
    with pytest.raises(ValueError, match=r"they differ: norm\.weight\."):
        merged({f"{ENCODER}norm.weight": tensor, f"{DECODER}norm.weight": change(tensor)})


# --- which weights are compared -------------------------------------------------------------------


TWICE = {f"{half}norm.weight": torch.ones(7) for half in (DECODER, ENCODER)}
ONCE = {f"{DECODER}up.weight": torch.ones(5), f"{ENCODER}down.weight": torch.ones(3)}


def test_only_weights_that_come_twice_are_read_for_comparison(monkeypatch):
    digests = record_calls(monkeypatch, weights_module, "_digest")
    weights = TWICE | ONCE | {"lm_head.weight": torch.ones(2)}
    pairs = list(merge_shared_copies(weights.items(), LayerScalars(LAYERS), weights))
    assert [name for name, _ in pairs][:4] == [
        f"{DECODER}norm.weight",
        f"{DECODER}up.weight",
        f"{DECODER}down.weight",
        "lm_head.weight",
    ]
    assert [tensor.numel() for (tensor,), _ in digests] == [7, 7]


def test_a_second_copy_that_was_not_announced_is_refused():
    """Its first copy was not compared, so nobody knows whether they are equal."""
    with pytest.raises(ValueError, match=r"norm\.weight"):
        list(merge_shared_copies(TWICE.items(), LayerScalars(LAYERS), [f"{DECODER}norm.weight"]))


def test_the_names_of_a_checkpoint_are_those_in_its_files(tmp_path):
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.ones(1)}, tmp_path / "model-2.safetensors")
    assert checkpoint_names(str(tmp_path), None) == {"a", "b", "c"}


def test_a_checkpoint_without_safetensors_has_no_known_names(tmp_path):
    assert checkpoint_names(str(tmp_path), None) is None
    assert checkpoint_names("nobody/has-downloaded-this", None) is None


# --- layer scalars -------------------------------------------------------------------------------


def scalars(prefix: str, values: list[float | None], shape: tuple[int, ...] = (1,)) -> dict:
    """``layer_scalar`` of every layer that has one."""
    return {
        f"{prefix}layers.{layer}.layer_scalar": torch.full(shape, value)
        for layer, value in enumerate(values)
        if value is not None
    }


HALF, ONE = [0.5, 0.25, 0.125], [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("weights", "head", "canvas"),
    [
        (scalars(ENCODER, HALF), HALF, HALF),
        (scalars(DECODER, HALF), HALF, HALF),
        (scalars("model.", HALF), HALF, HALF),
        (scalars(ENCODER, HALF) | scalars(DECODER, [2.0, 3.0, 4.0]), HALF, [2.0, 3.0, 4.0]),
        ({}, ONE, ONE),
        # A layer that one half leaves out has the other half's, layer by layer.
        (
            scalars(ENCODER, [0.5, None, None]) | scalars(DECODER, [2.0, 3.0, None]),
            [0.5, 3.0, 1.0],
            [2.0, 3.0, 1.0],
        ),
        (scalars(DECODER, HALF, shape=()), HALF, HALF),
    ],
    ids=["encoder", "decoder", "flat", "both", "none", "by layer", "0-d"],
)
def test_layer_scalars_of_the_two_halves(weights, head, canvas):
    result = merged(weights)
    assert set(result) == {HEAD_SCALARS, CANVAS_SCALARS}
    assert result[HEAD_SCALARS].tolist() == head
    assert result[CANVAS_SCALARS].tolist() == canvas


def test_layer_scalars_may_differ_and_come_in_any_order():
    first = scalars(ENCODER, HALF) | scalars(DECODER, ONE)
    last = dict(reversed(first.items()))
    for name, tensor in merged(first).items():
        assert torch.equal(merged(last)[name], tensor)


# --- through the engine --------------------------------------------------------------------------

SAMPLING = SamplingParams(max_tokens=2 * CANVAS, seed=3, ignore_eos=True)


def refusal(path: Path) -> str:
    """What the start of an engine says."""
    with pytest.raises(Exception) as error:  # safetensors' own is one of them
        Engine(path, max_num_batched_tokens=256)
    return f"{type(error.value).__name__}: {error.value}"


def test_a_checkpoint_with_both_copies_serves_the_same_tokens(engine, checkpoint):
    both = checkpoint(encoder_copies=True)
    names = load_file(both / "model.safetensors").keys()
    assert f"{ENCODER}layers.1.self_attn.q_proj.weight" in names
    twin = get_engine(both, max_num_batched_tokens=256)
    contexts = [prompt(70), prompt(5)]
    assert twin.generate(contexts, SAMPLING) == engine.generate(contexts, SAMPLING)


def test_copies_that_disagree_stop_the_start_with_their_names(checkpoint, tmp_path):
    def swap_two(weights: dict[str, torch.Tensor]) -> None:
        for name in ("layers.2.mlp.up_proj.weight", "layers.0.self_attn.q_proj.weight"):
            weights[ENCODER + name] = swap(weights[ENCODER + name])

    path = edited(checkpoint(encoder_copies=True), tmp_path / "edited", swap_two)
    names = "layers.0.self_attn.q_proj.weight, layers.2.mlp.up_proj.weight."
    assert f"differ: {names}" in refusal(path)


def test_missing_tensors_stop_the_start_with_their_names(checkpoint, tmp_path):
    """vLLM's own check exempts every linear layer, embedding and expert."""
    names = [
        "embed_tokens.weight",
        "layers.0.self_attn.v_proj.weight",  # a third of a stacked parameter
        "layers.1.self_attn.k_proj.weight",  # keys and values of a full layer
        "layers.2.mlp.gate_proj.weight",  # half of one
        "layers.3.experts.down_proj",
        "layers.3.self_attn.o_proj.weight",
        "norm.weight",
        "self_conditioning.up_proj.weight",
    ]

    def drop(weights: dict[str, torch.Tensor]) -> None:
        for name in names:
            del weights[DECODER + name]

    listed = ", ".join(DECODER + name for name in names)
    assert f"the checkpoint misses {listed}. " in refusal(
        edited(checkpoint(), tmp_path / "edited", drop)
    )


@pytest.mark.parametrize("layer", ["self_attn.q_norm", "self_attn.q_proj"])  # kept, and packed
def test_a_weight_that_is_not_finite_stops_the_start(checkpoint, tmp_path, layer):
    name = f"layers.1.{layer}.weight"

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DECODER + name].view(-1)[3] = float("nan")

    said = refusal(edited(checkpoint(), tmp_path / "edited", poison))
    assert "NaN or infinite" in said and name in said
    assert "Download or convert it again" in said


def test_a_truncated_file_stops_the_start(checkpoint, tmp_path):
    path = Path(shutil.copytree(checkpoint(), tmp_path / "truncated"))
    os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size // 2)
    said = refusal(path)
    assert "SafetensorError" in said and "incomplete" in said.lower()


def test_shapes_of_another_config_stop_the_start(checkpoint, tmp_path):
    text = json.loads((checkpoint() / "config.json").read_text())["text_config"]
    text["intermediate_size"] *= 2
    path = with_fields(checkpoint(), tmp_path / "other", text_config=text)
    assert "size" in refusal(path).lower()


def test_which_values_are_finite():
    good = [
        ("counts", torch.tensor([1])),
        ("nothing", torch.empty(0)),
        ("largest", torch.tensor([65504.0] * 9, dtype=torch.half)),
        ("eight bits", torch.tensor([torch.nan]).to(torch.float8_e4m3fn)),
    ]
    assert [name for name, _ in finite(good)] == [name for name, _ in good]
    for value in (torch.inf, -torch.inf, torch.nan):
        with pytest.raises(ValueError, match="in scale"):
            list(finite([*good, ("scale", torch.tensor([0, value], dtype=torch.bfloat16))]))


def test_scalars_that_a_trainer_sends_on_the_device():
    """A layer without one has 1, beside those of the others."""
    scalars = LayerScalars(2)
    with DeviceWatch() as watch:
        scalars.add("model.decoder.layers.0.layer_scalar", on_device(torch.tensor(3.0)))
        taken = dict(scalars.take())
    assert not watch.findings
    assert [scalar.tolist() for scalar in off_device(list(taken.values()))] == [[3, 1]] * 2
