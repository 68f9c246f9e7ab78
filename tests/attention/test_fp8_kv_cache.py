"""``--kv-cache-dtype fp8`` on a CPU: vLLM's kernel and our anchored window on E4M3 pages."""

import pytest
import torch
from transformers.models.diffusion_gemma import modeling_diffusion_gemma
from vllm import SamplingParams
from vllm import _custom_ops as ops

from dllm.attention.cpu_backend import nearest
from tests.engine.test_parity import prompt
from tests.support import hf_reference
from tests.support.engine_harness import get_engine
from tests.support.quant_reference import PASSES_APART, Lockstep, Recording, relative

EAGER = modeling_diffusion_gemma.eager_attention_forward
ONE_BLOCK = SamplingParams(max_tokens=1, seed=5, ignore_eos=True)

# vLLM's own refusal elsewhere names the two; there is nothing for us to add.
pytestmark = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's CPU kernel needs AVX-512 or AMX for an FP8 KV cache",
)


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "fp8"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
def test_the_cache_holds_the_nearest_values(name, fp8, dtype, scale):
    """vLLM's kernel truncates: every code, and numbers between and beyond them."""
    codes = torch.arange(256, dtype=torch.uint8).view(fp8).float()
    codes = codes[codes.isfinite()]
    others = torch.randn(2048 - len(codes), generator=torch.Generator().manual_seed(0))
    others[:9] = torch.tensor([1e9, -1e9, 460.0, 1e-9, -1e-9, 6e4, -6e4, 2.0**-10, 2.0**-9])
    values = (torch.cat([codes, 3 * others]) * scale).to(dtype).view(32, 2, 32)
    cache = torch.zeros(1, 2, 64, 32, dtype=torch.uint8)
    keys, stored = cache.chunk(2, dim=2)

    def write(tensor: torch.Tensor) -> torch.Tensor:
        ops.cpu_attn_reshape_and_cache(
            *(tensor, tensor, keys, stored, torch.arange(32), "vec"),
            k_scale=scale,
            v_scale=scale,
            kv_cache_dtype=name,
        )
        return stored.contiguous().view(fp8).float()[0].transpose(0, 1)

    largest = torch.finfo(fp8).max
    expected = (values.float() / scale).clamp(-largest, largest).to(fp8).float()
    assert torch.equal(write(nearest(values, fp8, scale)), expected)
    assert not torch.equal(write(values), expected), "vLLM rounds now: nearest() can go"


def in_e4m3(module, query, key, value, *args, **kwargs):
    """The reference's attention, which sees keys and values rounded to E4M3 at scale 1."""
    key, value = (part.to(torch.float8_e4m3fn).to(part.dtype) for part in (key, value))
    return EAGER(module, query, key, value, *args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("context_len", [40, 150])  # within the window, and beyond it
def test_attention_sees_keys_and_values_in_e4m3(checkpoint, context_len, monkeypatch):
    """In lockstep with Hugging Face, whose attention sees them rounded, or not."""
    options = dict(kv_cache_dtype="fp8", additional_config=PASSES_APART)
    engine = get_engine(checkpoint(), max_num_batched_tokens=256, **options)
    context = prompt(context_len)
    recording = Recording(engine.runner.model)
    _, (step, *_) = engine.denoised(context, ONE_BLOCK)
    recording.stop()
    lockstep = Lockstep(hf := hf_reference.load_hf(checkpoint()), recording)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_diffusion_gemma, "eager_attention_forward", in_e4m3)
        logits = hf_reference.one_step_logits(hf, context, step.canvas)
    rounded = attended(lockstep)
    hf_reference.one_step_logits(hf, context, step.canvas)
    unrounded = attended(lockstep)
    assert relative(step.logits, logits) < 1e-4
    for name, distance in rounded.items():
        # A key that fp32 arithmetic in another order moves across the middle between two codes
        # moves by 6%; without rounding, all of them do, by 2.5% at the median.
        assert distance < 0.1 * unrounded[name], name


def attended(lockstep: Lockstep) -> dict[str, float]:
    """How far the outputs of attention, which o_proj takes, are from the served ones."""
    return {name: d for name, d in lockstep.distances.items() if name.endswith("o_proj")}
