"""The number formats and the schemes: against exhaustive search, and against what they refuse."""

import numpy as np
import pytest
import torch

from dllm.quant.formats import decode_fp4, dequantize_weight, encode_fp4, round_trip, to_fp8
from dllm.quant.schemes import SCHEMES, parse_plan, shared_name
from tests.support import naive_formats as naive
from tests.support.quant_checkpoints import (
    OURS,
    REDHAT,
    dequantize,
    quantization_config,
    quantize,
)

BY_NAME = {scheme.name: scheme for scheme in SCHEMES.values()}
# A step of fp32 arithmetic; the naive formats count in float64.
FP32 = 1e-6


def rows(count: int = 40, columns: int = 96, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, with outliers and zeros, as activations have them."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(count, columns, generator=random)
    values *= torch.logspace(-3, 3, count)[:, None]
    values[::7, 5] *= 50
    values[3] = 0
    values[5, 16:32] = 0
    return values


def test_every_fp4_code_is_its_definition():
    codes = torch.arange(16, dtype=torch.uint8)
    expected = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.equal(decode_fp4(codes), torch.cat([expected, -expected]))
    assert torch.equal(encode_fp4(decode_fp4(codes)), codes)


def test_fp4_rounds_to_the_nearest_and_ties_to_even():
    # Every multiple of 1/64, so every tie, and values beyond the largest.
    values = torch.arange(-512, 513) / 64
    expected = naive.rounded(values.double().numpy(), naive.FP4)
    assert decode_fp4(encode_fp4(values)).tolist() == expected.tolist()


def test_fp8_is_e4m3_by_definition_and_saturates():
    codes = torch.arange(127, dtype=torch.uint8)
    assert codes.view(torch.float8_e4m3fn).double().tolist() == naive.FP8.tolist()
    values = torch.cat([torch.linspace(0, 460, 9001), torch.tensor([1e9, float("inf")])])
    expected = naive.FP8[naive.nearest(values.double().clamp(max=1e9).numpy(), naive.FP8)]
    assert to_fp8(values).double().tolist() == expected.tolist()
    assert to_fp8(-values).double().tolist() == (-expected).tolist()


@pytest.mark.parametrize(("numbers", "table"), [("fp8", naive.FP8), ("int8", naive.INT8)])
def test_each_token_has_a_scale_of_its_own(numbers, table):
    """compressed-tensors takes one scale for a whole 2-D tensor: small rows would vanish."""
    values = rows()
    trip = round_trip(values, numbers)
    expected = naive.round_trip_tokens(values.numpy(), table)
    off = np.abs(trip.double().numpy() - expected) > FP32 * np.abs(values.double().numpy())
    # fp32 and float64 may round a value that lies at a tie to either side.
    assert off.mean() < 1e-3
    # One scale for all rows would leave nothing of those that are a millionth of the largest.
    lost = (trip - values).norm(dim=1) / values.norm(dim=1).clamp(min=1e-30)
    assert lost.max() < 0.1


def test_rows_do_not_depend_on_their_neighbours():
    values = rows()
    for numbers, divisor in (("fp8", None), ("int8", None), ("nvfp4", torch.tensor([30.0]))):
        together = round_trip(values, numbers, divisor)
        alone = torch.stack([round_trip(row, numbers, divisor) for row in values])
        assert torch.equal(together, alone), numbers


@pytest.mark.parametrize("divisor", [0.5, 30.0, 336.0, 1e5])
def test_nvfp4_round_trip_with_a_static_global_scale(divisor):
    """Also where it does not fit the data: groups saturate, or vanish below E4M3."""
    values = rows()
    trip = round_trip(values, "nvfp4", torch.tensor([divisor]))
    expected = naive.round_trip_nvfp4(values.numpy(), divisor)
    off = np.abs(trip.double().numpy() - expected) > FP32 * np.abs(values.double().numpy())
    assert off.mean() < 1e-3
    assert torch.isfinite(trip).all()


@pytest.mark.parametrize(
    ("scheme", "low", "high"),
    [("fp8-dynamic", 0.024, 0.028), ("int8-dynamic", 0.004, 0.012), ("nvfp4", 0.09, 0.1)],
)
def test_weights_come_back_with_the_error_of_their_format(scheme, low, high):
    """Relative L2 of a normal weight: about 2.5% in FP8 and 9.5% in NVFP4."""
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    parts = quantize(weight, scheme, 448 * 6 / float(weight.abs().max()))
    found = dequantize_weight(parts, BY_NAME[scheme].weights)
    assert low < (found - weight).norm() / weight.norm() < high
    torch.testing.assert_close(found, dequantize(parts).float(), rtol=FP32, atol=0)


# --- schemes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(BY_NAME))
def test_schemes_are_found_in_the_configs_that_tools_write(name):
    plan = parse_plan(quantization_config(name, OURS, {}))
    scheme = plan.scheme_of("model.decoder.layers.0.self_attn.q_proj")
    assert scheme == BY_NAME[name]
    assert plan.scheme_of("model.decoder.layers.3.experts.2.down_proj") == scheme
    for kept in ("lm_head", "model.decoder.layers.0.router.proj", "model.decoder.norm"):
        assert plan.scheme_of(kept) is None
    assert plan.scheme_of("model.decoder.self_conditioning.up_proj") is None


def test_an_ignore_list_counts_in_both_halves_of_the_model():
    config = quantization_config("fp8-dynamic", REDHAT, {"model.layers.0.router.proj.weight": 0})
    config["ignore"] += ["model.encoder.language_model.layers.1.mlp.up_proj"]
    plan = parse_plan(config)
    assert plan.scheme_of("model.decoder.layers.1.mlp.up_proj") is None
    assert plan.scheme_of("model.decoder.layers.11.mlp.up_proj") is not None
    assert shared_name("model.decoder.layers.1.mlp") == "layers.1.mlp"


def broken(**changes: object) -> dict:
    """A config whose weights differ from FP8's."""
    config = quantization_config("fp8-dynamic", OURS, {})
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (broken(num_bits=4, type="int", strategy="group", group_size=128), "int4, a scale per gro"),
        (broken(num_bits=4, strategy="tensor_group", group_size=32), "tensor_group of 32"),
        (broken(symmetric=False), "weights asymmetric"),
        ({"quant_method": "gptq"}, "quant_method = 'gptq'; supported: compressed-tensors"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "at least one group"),
    ],
)
def test_other_schemes_are_refused_with_what_is_supported(config, message):
    with pytest.raises(ValueError, match=message) as refusal:
        parse_plan(config)
    if config.get("config_groups"):
        assert all(name in str(refusal.value) for name in BY_NAME)
