"""The kernel of the drafter's context against its definition in torch.

``tests/test_kernel_suites.py`` runs this in Triton's interpreter, or compiled on a GPU. By hand:
`TRITON_INTERPRET=1 pytest --noconftest tests/drafter/context_kernel_suite.py`.

Tolerances, element by element, against the definition in fp64 from the same rounded inputs. Let u
be the unit roundoff of the dtype and e = 2^-24. The kernel computes in fp32 and rounds the result
once: u |x|. A sum of n products in fp32, in any order, is off by at most n e sum |w x| (Higham,
Accuracy and Stability of Numerical Algorithms, 3.1). The norm multiplies a key, and that error, by
a scale, which is off itself by the errors of the head and head_size e; RoPE adds two dimensions,
which doubles at most, and rounds less than four times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding import get_rope

from dllm.attention import context_kv
from dllm.attention.backend import CanvasAttentionBackend, CanvasAttentionImpl
from dllm.attention.context_kv import ContextTiles, context_tiles, write_context_kv
from dllm.drafter.cache import OWN_DTYPES
from dllm.drafter.context import NO_SLOT
from dllm.drafter.network import DrafterNetwork
from tests.support.interpreter import DEVICE, UNIT_ROUNDOFF, speed_up

speed_up()
EPSILON = 2**-24  # unit roundoff of fp32
POSITIONS = 4096  # of the table of RoPE


@dataclass(frozen=True)
class Spec:
    """The sizes of a drafter and of one call."""

    num_tokens: int = 21
    hidden: int = 48
    layers: int = 2
    heads: int = 2
    head_size: int = 64
    rotary_size: int = 64
    is_neox: bool = True
    has_bias: bool = False
    dtype: torch.dtype = torch.float32
    page_size: int = 16
    page_padding: int = 0  # elements behind each page
    slots_dtype: torch.dtype = torch.int64


@dataclass
class Case:
    """A drafter's network, and the arguments of one call."""

    spec: Spec
    network: DrafterNetwork
    hidden: Tensor
    positions: Tensor
    slots: list[Tensor]

    @property
    def layers(self) -> list[Any]:
        """What vLLM's attention layers are."""
        return self.network._attn_layers

    @property
    def caches(self) -> list[Tensor]:
        """Each layer's ``[pages, heads, page_size, 2 * head_size]``."""
        return [layer.kv_cache for layer in self.layers]

    def write(self) -> None:
        """Write the context as a server does."""
        self.network.precompute_and_store_context_kv(self.hidden, self.positions, self.slots)

    def write_by_kernel(self, **changed: Any) -> None:
        """The same by the kernel, with other arguments."""
        caches = [layer.impl.paged_kv(layer, layer.kv_cache) for layer in self.layers]
        arguments = dict(
            hidden=self.network.hidden_norm(self.hidden), positions=self.positions,
            weights=self.network.kernel_weights, caches=caches, slots=self.slots,
        )  # fmt: skip
        write_context_kv(**(arguments | changed))


def make_case(spec: Spec, num_query_heads: int = 3) -> Case:
    """Random weights and tokens, caches full of NaN, and slots that differ from layer to layer.

    A third of the tokens has no slot; what would be computed from them is NaN.
    """
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=random) * scale).to(spec.dtype).to(DEVICE)

    width = (num_query_heads + 2 * spec.heads) * spec.head_size
    num_pages = -(-spec.num_tokens // spec.page_size) + 3
    with set_current_vllm_config(VllmConfig()), torch.device(DEVICE):
        parameters = {"rope_type": "default", "rope_theta": 10000.0}
        parameters["partial_rotary_factor"] = spec.rotary_size / spec.head_size
        rope = get_rope(spec.head_size, POSITIONS, spec.is_neox, parameters, dtype=spec.dtype).to(
            DEVICE
        )
        hidden_norm = RMSNorm(spec.hidden, eps=1e-5, dtype=spec.dtype)  # a drafter has one eps
    assert rope.rotary_dim == spec.rotary_size
    hidden_norm.weight.data = 1 + draw(spec.hidden, scale=0.1)
    attentions = []
    for _ in range(spec.layers):
        pages = torch.full(
            (num_pages, spec.heads * spec.page_size * 2 * spec.head_size + spec.page_padding),
            float("nan"),
            dtype=spec.dtype,
            device=DEVICE,
        )
        cache = pages[:, : pages.shape[1] - spec.page_padding]
        cache = cache.unflatten(1, (spec.heads, spec.page_size, 2 * spec.head_size))
        layer = SimpleNamespace(
            attn_backend=CanvasAttentionBackend,
            impl=CanvasAttentionImpl(num_query_heads, spec.head_size, 1.0, spec.heads),
            kv_cache=cache,
            kv_cache_torch_dtype=spec.dtype,
        )
        projection = SimpleNamespace(
            quant_method=UnquantizedLinearMethod(),
            weight=draw(width, spec.hidden, scale=spec.hidden**-0.5),
            bias=draw(width) if spec.has_bias else None,
        )
        norm = SimpleNamespace(weight=1 + draw(spec.head_size, scale=0.3), variance_epsilon=1e-5)
        attentions.append(
            SimpleNamespace(
                qkv_proj=projection, k_norm=norm, q_norm=norm, rotary_emb=rope, attn=layer,
                num_kv_heads=spec.heads, head_dim=spec.head_size,
                q_size=num_query_heads * spec.head_size, kv_size=spec.heads * spec.head_size,
            )
        )  # fmt: skip
    hidden = draw(spec.num_tokens, spec.hidden)
    positions = torch.randint(0, POSITIONS, (spec.num_tokens,), generator=random)
    slots = []
    skipped = torch.arange(spec.num_tokens) % 3 == 1
    if spec.num_tokens > 1:
        hidden[skipped.to(DEVICE)] = float("nan")
        positions[skipped] = 10**12
    for _ in range(spec.layers):
        slot = torch.randperm(num_pages * spec.page_size, generator=random)[: spec.num_tokens]
        slot[skipped] = NO_SLOT
        slots.append(slot.to(spec.slots_dtype).to(DEVICE))
    network = DrafterNetwork.__new__(DrafterNetwork)
    torch.nn.Module.__init__(network)
    network.hidden_norm = hidden_norm
    network.layers = [SimpleNamespace(self_attn=attention) for attention in attentions]
    network._build_fused_kv_buffers()
    return Case(spec, network, hidden, positions.to(DEVICE), slots)


def check(case: Case) -> None:
    """Every stored number within the tolerance, everything else of the caches still NaN."""
    spec = case.spec
    keys, values, key_error, value_error = definition(case)
    for layer, cache in enumerate(case.caches):
        is_stored = case.slots[layer] >= 0
        slots = case.slots[layer][is_stored].long()
        page, place = slots // spec.page_size, slots % spec.page_size
        stored = cache[page, :, place].double()  # [tokens, heads, 2 * head_size]
        expected = torch.cat([keys[layer], values[layer]], -1)[is_stored]
        error = torch.cat([key_error[layer], value_error[layer]], -1)[is_stored]
        bound = UNIT_ROUNDOFF[spec.dtype] * expected.abs() + error
        excess = ((stored - expected).abs() - bound).nan_to_num(nan=float("inf"))
        assert (excess <= 0).all(), f"layer {layer}: out of bounds by up to {excess.max():.3g}"
        untouched = torch.ones(cache.shape[0], spec.page_size, dtype=torch.bool, device=DEVICE)
        untouched[page, place] = False
        assert cache.transpose(1, 2)[untouched].isnan().all(), f"layer {layer}: wrote elsewhere"


def definition(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values ``[layers, tokens, heads, head_size]`` in fp64, and how far fp32 is off."""
    spec, network = case.spec, case.network
    normed = network.hidden_norm(case.hidden).double()
    assert network._fused_kv_weight is not None
    weight = network._fused_kv_weight.double()
    shape = (-1, spec.layers, 2, spec.heads, spec.head_size)
    product = normed @ weight.T
    bias = network._fused_kv_bias
    if bias is not None:
        product = product + bias.double()
    magnitude = normed.abs() @ weight.abs().T
    if bias is not None:
        magnitude = magnitude + bias.double().abs()
    error = (spec.hidden + 1) * EPSILON * magnitude
    keys, values = product.view(shape).unbind(2)
    key_error, value_error = error.view(shape).unbind(2)
    scale = (keys.square().mean(-1, keepdim=True) + network._rms_norm_eps).rsqrt()
    norm = network._k_norm_weights.double()[:, None]
    keys = keys * scale * norm
    scale_error = (key_error * scale).amax(-1, keepdim=True) + spec.head_size * EPSILON
    key_error = key_error * scale * norm.abs() + keys.abs() * scale_error
    key_error = 2 * key_error.amax(-1, keepdim=True) + 4 * EPSILON * keys.abs().amax(-1, True)
    results = rotate(case, keys), values, key_error.expand_as(keys), value_error
    keys, values, key_error, value_error = (each.transpose(0, 1) for each in results)
    return keys, values, key_error, value_error


def rotate(case: Case, keys: Tensor) -> Tensor:
    """RoPE in fp64, written from its definition: pairs of dimensions are turned by an angle."""
    spec = case.spec
    table = case.network._rope_cos_sin_cache.double()
    angles = table[case.positions.clamp(max=POSITIONS - 1)][:, None, None]
    cos, sin = angles.chunk(2, -1)
    half = spec.rotary_size // 2
    if spec.is_neox:
        first, second = list(range(half)), list(range(half, 2 * half))
    else:
        first, second = list(range(0, 2 * half, 2)), list(range(1, 2 * half, 2))
    turned = keys.clone()
    turned[..., first] = keys[..., first] * cos - keys[..., second] * sin
    turned[..., second] = keys[..., second] * cos + keys[..., first] * sin
    return turned


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each call of ``write`` went."""
    branches: list[str] = []
    kernel, project = context_kv.write_context_kv, DrafterNetwork._project_context_kv

    def spy_kernel(*args: Any) -> None:
        branches.append("kernel")
        kernel(*args)

    def spy_project(*args: Any) -> tuple[Tensor, Tensor]:
        branches.append("vLLM")
        return project(*args)

    monkeypatch.setattr(context_kv, "write_context_kv", spy_kernel)
    monkeypatch.setattr(DrafterNetwork, "_project_context_kv", spy_project)
    return branches


SPECS = {
    "head size 64": Spec(),
    "head size 128": Spec(head_size=128, rotary_size=128),
    "interleaved": Spec(is_neox=False),
    "half of a head turned": Spec(rotary_size=32),
    "half of a head turned, interleaved": Spec(rotary_size=32, is_neox=False),
    "head size 80, which is padded": Spec(head_size=80, rotary_size=80, heads=1),
    "head size 80, a quarter turned": Spec(head_size=80, rotary_size=20, heads=1),
    "head size 80, interleaved": Spec(head_size=80, rotary_size=40, is_neox=False, heads=3),
    "bias": Spec(has_bias=True),
    "bias, interleaved, padded": Spec(has_bias=True, is_neox=False, head_size=48, rotary_size=48),
    "odd hidden size": Spec(hidden=131),
    "one token": Spec(num_tokens=1),
    "many token tiles": Spec(num_tokens=300, layers=1, heads=1),
    "three layers": Spec(layers=3, heads=1),
    "pages of 48": Spec(page_size=48),
    "pages with padding behind them": Spec(page_padding=96),
    "int32 slots": Spec(slots_dtype=torch.int32),
    "fp16": Spec(dtype=torch.float16),
    "bf16": Spec(dtype=torch.bfloat16),
    "bf16, interleaved, head size 128": Spec(
        dtype=torch.bfloat16, is_neox=False, head_size=128, rotary_size=128
    ),
    "bf16, many tokens": Spec(dtype=torch.bfloat16, num_tokens=150, layers=1),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_kernel_computes_the_definition(spec: Spec, taken: list[str]) -> None:
    case = make_case(spec)
    case.write()
    check(case)
    assert taken == ["kernel"]


@pytest.mark.parametrize("is_neox", [True, False])
def test_vllms_operations_compute_the_definition_too(is_neox: bool, taken: list[str]) -> None:
    """On the same case: a reader of the other test may believe the tolerance."""
    case = make_case(Spec(is_neox=is_neox, has_bias=True))
    case.positions.clamp_(max=POSITIONS - 1)  # it computes also what has no slot
    case.network.kernel_weights = None
    case.write()
    check(case)
    assert taken == ["vLLM"]


@pytest.mark.parametrize("tokens", [16, 32])
@pytest.mark.parametrize("is_neox", [True, False])
def test_groups_of_tiles_cover_everything_once(
    tokens: int, is_neox: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full groups and a smaller one at the end."""
    monkeypatch.setattr(context_kv, "TILE_GROUP", 2)
    case = make_case(Spec(num_tokens=16 * 5 + 3, heads=1, hidden=32, is_neox=is_neox))
    case.write_by_kernel(tiles=ContextTiles(tokens, 16, 4, 1))
    check(case)


def test_no_tokens_write_nothing(taken: list[str]) -> None:
    case = make_case(Spec(num_tokens=0))
    case.write()
    assert all(cache.isnan().all() for cache in case.caches)
    assert taken == ["kernel"]


def test_no_slots_write_nothing(taken: list[str]) -> None:
    """All tokens are padding; and a profiling run, which has no caches yet."""
    case = make_case(Spec())
    for slots in case.slots:
        slots.fill_(NO_SLOT)
    case.write()
    assert all(cache.isnan().all() for cache in case.caches)
    for layer in case.layers:
        layer.kv_cache = torch.tensor([])
    case.network.precompute_and_store_context_kv(case.hidden, case.positions, None)
    assert taken == ["kernel"]


def test_slots_that_are_a_part_of_a_buffer(taken: list[str]) -> None:
    """As vLLM passes the context behind what a CUDA graph stores."""
    whole = make_case(Spec(num_tokens=33))
    for start, stop in ((0, 5), (5, 33)):
        part: Sequence[Tensor] = [slots[start:stop] for slots in whole.slots]
        tokens = whole.hidden[start:stop], whole.positions[start:stop]
        whole.network.precompute_and_store_context_kv(*tokens, part)
    check(whole)
    assert taken == ["kernel", "kernel"]


def test_layers_of_one_group_share_their_slots(taken: list[str]) -> None:
    """Slots are one tensor for the first and the last layer, and copied for none alone."""
    case = make_case(Spec(layers=3))
    case.slots[2] = case.slots[0]
    case.write()
    check(case)
    assert context_kv._rows(case.slots)[1] == (0, 1, 0)
    rows, row_of = context_kv._rows(case.slots[::2])
    assert rows.data_ptr() == case.slots[0].data_ptr() and row_of == (0, 0)
    assert taken == ["kernel"]


def without_weight(case: Case) -> None:
    for layer in case.network.layers:
        layer.self_attn.qkv_proj.quant_method = object()


def other_backend(case: Case) -> None:
    case.layers[1].attn_backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")


def fp8_cache(case: Case) -> None:
    case.layers[1].kv_cache_torch_dtype = torch.uint8


@pytest.mark.parametrize("change", [without_weight, other_backend, fp8_cache])
def test_what_the_kernel_cannot_do_is_left_to_vllm(change: Any) -> None:
    case = make_case(Spec())
    assert case.network.kernel_weights is not None
    change(case)
    del case.network._num_attn_layers  # or nothing would be built again
    case.network._build_fused_kv_buffers()
    assert case.network.kernel_weights is None


def test_layers_with_other_pages_are_left_to_vllm(taken: list[str]) -> None:
    """One layer's pages are twice as long, as where vLLM equals page sizes of several groups."""
    case = make_case(Spec(page_size=16))
    case.positions.clamp_(max=POSITIONS - 1)
    longer = make_case(Spec(page_size=32))
    case.layers[1].kv_cache = longer.caches[1]
    case.write()
    assert taken == ["vLLM"]
    stored = longer.caches[1].transpose(1, 2).flatten(0, 1)
    is_stored = case.slots[1] >= 0
    assert not stored[case.slots[1][is_stored]].isnan().any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"positions": 5}, "hidden is"),
        ({"slots": 1}, "slots of 1 layers"),
        ({"dtype": torch.float16}, "weight is .* torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    case = make_case(Spec(num_tokens=6))
    with pytest.raises(ValueError, match=words):
        case.write_by_kernel(
            hidden=case.hidden.to(change.get("dtype", torch.float32)),
            positions=case.positions[: change.get("positions", 6)],
            slots=case.slots[: change.get("slots", 2)],
        )


def test_head_sizes_that_are_odd_are_refused() -> None:
    case = make_case(Spec(num_tokens=6))
    weights = case.network.kernel_weights
    assert weights is not None
    with pytest.raises(ValueError, match="63 columns"):
        case.write_by_kernel(weights=replace(weights, cos_sin=weights.cos_sin[:, :-1]))


def test_the_drafter_may_keep_what_our_backend_supports() -> None:
    assert list(OWN_DTYPES) == CanvasAttentionBackend.supported_kv_cache_dtypes


def test_few_tokens_have_their_own_tiles() -> None:
    assert context_tiles(16, 128, 2).tokens == 16
    assert context_tiles(17, 128, 2).tokens == 128
    assert context_tiles(1000, 256, 2).tokens == 64
