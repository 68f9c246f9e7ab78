"""The number formats of quantized checkpoints: encode, decode, and both in turn.

    FP8     E4M3: sign, 4 exponent bits, 3 mantissa bits, no infinity; largest value 448
    INT8    two's complement, used from -127 to 127
    FP4     E2M1: sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; two to a byte, the low half first

What a code stands for:

    FP8, INT8   x = code * scale                         a scale for each row: for each output
                                                         channel of a weight, each token of inputs
    NVFP4       x = code * group_scale / global_scale    FP4 codes; an E4M3 scale for each group of
                                                         16 neighbours in a row; one fp32 divisor
                                                         for the whole tensor

Rounding is to nearest, ties to the even code; what is too large becomes the largest value. The
scale of a row is its largest magnitude divided by the format's largest value, but never smaller
than the smallest scale in vLLM's kernels. The global scale is a divisor, as compressed-tensors
stores it; it brings the group scales into the range of E4M3.

Written from the definitions (OCP 8-bit floating point, OCP microscaling FP4, NVIDIA's NVFP4) and
independent of compressed-tensors, so that an error there is found here: its dynamic per-token scale
of a 2-D tensor, for example, is one scale for all rows.
"""

from collections.abc import Mapping
from typing import Literal

import torch

QuantDtype = Literal["fp8", "int8", "nvfp4"]

FP8_MAX = 448.0
INT8_MAX = 127.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_MAX = FP4_VALUES[-1]
NVFP4_GROUP = 16
ROW_MAX = {"fp8": FP8_MAX, "int8": INT8_MAX}
# The smallest scale of a token in vLLM's kernels.
TINY = torch.finfo(torch.float32).tiny
LEAST_TOKEN_SCALE = {"fp8": 1.0 / (FP8_MAX * 512.0), "int8": TINY}

# The midpoints between neighbouring FP4 values. A midpoint rounds to the neighbour with the even
# code. bucketize puts it with the lower one; every second midpoint is moved a little down, so that
# it goes to the upper one.
_FP4_TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_FP4_TIES[1::2] = torch.nextafter(_FP4_TIES[1::2], torch.zeros(()))


def encode_fp4(values: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest E2M1 values: uint8, of the shape of ``values`` (fp32).

    A code is sign << 3 | index into ``FP4_VALUES``.
    """
    index = torch.bucketize(values.abs(), _FP4_TIES.to(values.device))
    return (index | (values.signbit().long() << 3)).to(torch.uint8)


def decode_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Values of E2M1 codes: fp32, the shape of ``codes`` (uint8)."""
    table = torch.tensor(FP4_VALUES + tuple(-value for value in FP4_VALUES), device=codes.device)
    return table[codes.long()]


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Two codes of each byte, that of the low half first: [..., n / 2] to [..., n] uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 values; torch alone would make NaN of what is too large."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def quantize_rows(
    values: torch.Tensor, quant_dtype: QuantDtype, least_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., n], in the format's dtype, and the scale of each row, [..., 1] fp32."""
    values = values.float()
    scale = values.abs().amax(dim=-1, keepdim=True) / ROW_MAX[quant_dtype]
    scale = scale.clamp(min=least_scale)
    if quant_dtype == "fp8":
        return to_fp8(values / scale), scale
    return (values / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def quantize_nvfp4(
    values: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP4 codes and the scale of each group: [..., n] uint8 and [..., n / 16] E4M3.

    ``values``: [..., n], n a multiple of 16. ``global_scale``: one fp32 value, the divisor.
    """
    groups = values.float().unflatten(-1, (-1, NVFP4_GROUP))
    scale = to_fp8(groups.abs().amax(dim=-1) / FP4_MAX * global_scale)
    step = (scale.float() / global_scale).unsqueeze(-1)
    # Where the group scale itself was rounded to 0, the values become 0.
    scaled = torch.where(step > 0, groups / step.clamp(min=TINY), 0.0)
    return encode_fp4(scaled).flatten(-2), scale


def dequantize_nvfp4(
    codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """[..., n] fp32, of codes [..., n] uint8 and the scales of groups, [..., n / 16] E4M3.

    ``global_scale``: the divisor, or several that broadcast with ``scale``.
    """
    groups = decode_fp4(codes).unflatten(-1, (-1, NVFP4_GROUP))
    return (groups * (scale.float() / global_scale).unsqueeze(-1)).flatten(-2)


def round_trip(
    values: torch.Tensor, quant_dtype: QuantDtype | None, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize and dequantize ``values`` as the inputs of a layer are; returns their own dtype.

    [..., n]: every row of n is a token with a scale of its own. ``global_scale``: the divisor from
    calibration; NVFP4 only.
    """
    if quant_dtype is None:
        return values
    if quant_dtype == "nvfp4":
        assert global_scale is not None, "NVFP4 activations need their static global scale"
        codes, scale = quantize_nvfp4(values, global_scale)
        return dequantize_nvfp4(codes, scale, global_scale).to(values.dtype)
    codes, scale = quantize_rows(values, quant_dtype, LEAST_TOKEN_SCALE[quant_dtype])
    return (codes.float() * scale).to(values.dtype)


def dequantize_weight(parts: Mapping[str, torch.Tensor], quant_dtype: QuantDtype) -> torch.Tensor:
    """The weight that a checkpoint's tensors stand for: [..., out, in] fp32.

    ``parts``: by the last part of their names, all with the same leading dimensions if there are
    any (experts). Others are not read. A global scale has one element in all, or one for each
    leading index.
    """
    if quant_dtype != "nvfp4":
        return parts["weight"].float() * parts["weight_scale"].float()
    codes = unpack_fp4(parts["weight_packed"])
    divisor = parts["weight_global_scale"].float()
    if divisor.numel() > 1:
        divisor = divisor.reshape(*codes.shape[:-2], 1, 1)
    return dequantize_nvfp4(codes, parts["weight_scale"], divisor)
