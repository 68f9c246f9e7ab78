"""LoRA adapters: an adapter is its merged weights, in every family and in any batch."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import StructuredOutputsParams

from dllm.engine.expert_adapters import take_apart
from dllm.engine.warm_up import made_up_adapters, serve_made_up
from dllm.patches.cpu_worker import padded_size
from dllm.patches.graph_check import MOST, largest_error
from tests.support.adapters import asked, merged, projections, write_adapter
from tests.support.engine_harness import Engine, assert_same_runs, get_engine, relative_error
from tests.support.family_checkpoints import FAMILIES as WITH_BLOCKS
from tests.support.family_checkpoints import WHOLE_SEQUENCES, write
from tests.support.quant_checkpoints import write_quantized

CONFIGS = WITH_BLOCKS | WHOLE_SEQUENCES
FAMILIES = ["gemma", *CONFIGS]
WITH_ADAPTERS = dict(enable_lora=True, max_loras=2, max_cpu_loras=4)
# Ids that every vocabulary has.
CONTEXTS = [[one * salt % 500 for one in range(1, 1 + salt)] for salt in (71, 22, 131, 43)]
GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=70, ignore_eos=True)
WIDTH = 1  # of the narrowest first canvas: rows of logits of a run that are of its first pass
# Of the largest logit: sums in another order, behind the sharp attention of random weights. At most
# 1.2e-5 was measured, with Nemotron; 1e-6 to 4e-6 elsewhere.
TOLERANCE = 2e-5


class Case(NamedTuple):
    """A checkpoint, two adapters of it, and what a server of each has."""

    base: Path
    adapters: list[Path]
    merged: list[Path]

    def requests(self) -> list[LoRARequest]:
        return [asked(path, number) for number, path in enumerate(self.adapters, 1)]

    def engine(self, **options: object) -> Engine:
        return get_engine(self.base, **WITH_ADAPTERS, **options)


@contextmanager
def rows_of_passes(engine: Engine) -> Iterator[list[tuple[int, int]]]:
    """Of each forward pass: how many rows have an adapter or none, and how many there are."""
    (layers,) = engine.runner.lora_manager._adapter_manager.punica_wrapper_mapping.values()
    rows: list[tuple[int, int]] = []

    def note(model: Any, args: Any, inputs: dict[str, Any]) -> None:
        rows.append((int(layers.prefill_metadata[1].sum()), len(inputs["positions"])))

    with engine.runner.model.register_forward_pre_hook(note, with_kwargs=True):
        yield rows


@pytest.fixture(scope="module")
def case(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Case]:
    @functools.cache
    def make(family: str) -> Case:
        path = tmp_path_factory.mktemp(family)
        base = checkpoint() if family == "gemma" else write(path / "base", CONFIGS[family])
        shapes = projections(base)
        adapters = [write_adapter(path / name, shapes, seed) for seed, name in enumerate("ab")]
        whole = [merged(base, one, path / f"{one.name}-merged") for one in adapters]
        return Case(base, adapters, whole)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_its_merged_weights_beside_others_in_a_batch(
    family: str, case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two adapters, and rows with none: a pass of all, then of canvases alone."""
    its = case(family)
    first, second = its.requests()
    for engine in (its.engine(), *map(get_engine, (its.base, *its.merged))):
        monkeypatch.setattr(engine.loop, "bound", 1e9)  # as many passes a step as there can be
    with rows_of_passes(its.engine()) as rows:
        runs = its.engine().runs(CONTEXTS, GREEDY, [None, first, second, first])
    assert all(num_rows in (mapped, padded_size(mapped)) for mapped, num_rows in rows)
    # In the same batch, because a batch of another size rounds differently.
    of_each = [get_engine(path).runs(CONTEXTS, GREEDY) for path in (its.base, *its.merged)]
    expected = [of_each[which][row] for row, which in enumerate((0, 1, 2, 1))]
    assert all(of_each[0][row].tokens != expected[row].tokens for row in (1, 2, 3))
    firsts = [relative_error(run.logits[:WIDTH], other.logits[:WIDTH])
              for run, other in zip(runs, expected, strict=True)]  # fmt: skip
    assert firsts[0] == 0 and max(firsts) < TOLERANCE, firsts
    assert_same_runs(runs, expected)


def test_vllms_classes_are_left_as_they_are(case: Callable[[str], Case]) -> None:
    """Behind a load they are vLLM's own, for other models of the process, and do not pile up."""
    case("llada2").engine()
    assert not hasattr(FusedMoEConfig.__post_init__, "__wrapped__")
    assert CpuPlatform.get_punica_wrapper().startswith("vllm.")


@pytest.mark.parametrize("names", ["abc", "aaa"])
def test_more_adapters_than_slots_wait_and_pages_are_of_one_adapter(
    names: str, case: Callable[[str], Case], tmp_path: Path
) -> None:
    """The same prompt with each adapter: whatever is in the prefix cache, it is not another's. One
    name: it was loaded anew, from other paths, while its requests ran.
    """
    its = case("sdar")
    paths = [*its.adapters, write_adapter(tmp_path / "c", projections(its.base), seed=2)]
    named = enumerate(zip(names, paths, strict=True), 1)
    adapters = [None, *(LoRARequest(name, number, str(path)) for number, (name, path) in named)]
    prompt = [one * 7 % 500 for one in range(1, 300)]
    alone = []
    for adapter in adapters:
        its.engine().reset_prefix_cache()
        alone += its.engine().generate([prompt], GREEDY, [adapter])
    assert len({*map(tuple, alone)}) == 4
    for _ in range(2):
        assert its.engine().generate([prompt] * 4, GREEDY, adapters) == alone
    (again,) = its.engine().outputs([prompt], GREEDY, adapters[-1:])
    assert again.num_cached_tokens > 0


@pytest.mark.parametrize("family", ["gemma", "sdar"])
def test_a_start_compares_with_an_adapter_whose_absence_it_would_see(
    family: str, case: Callable[[str], Case]
) -> None:
    runner = case(family).engine().runner
    with made_up_adapters(runner) as adapters:
        without, adapted = (
            [serve_made_up(runner, runner.execute_model, 2, adapter=one)] for one in adapters
        )
    assert MOST < largest_error(adapted, without) < float("inf")


@pytest.mark.parametrize("family", ["gemma", "sdar"])
def test_a_grammar_and_an_adapter(family: str, case: Callable[[str], Case]) -> None:
    its = case(family)
    rule = StructuredOutputsParams(regex="[a-f ]{20,60}")
    params = SamplingParams(temperature=0, seed=1, max_tokens=64, structured_outputs=rule)
    found = its.engine().generate(CONTEXTS, params, [its.requests()[0]] * 4)
    assert found == get_engine(its.merged[0]).generate(CONTEXTS, params)
    assert found != get_engine(its.base).generate(CONTEXTS, params)


HEAD = {"lm_head": (832, 64)}
EMBEDDING = {"model.embed_tokens": (832, 64)}
EXPERT = {"model.layers.0.mlp.experts.0.gate_proj": (32, 32)}
STACKED = {"model.decoder.layers.0.experts.down_proj": (3, 128, 64)}  # of other experts
CONDITIONING = {"model.decoder.self_conditioning.gate_proj": (128, 128)}
SMALLER = {"model.layers.0.self_attn.q_proj": (32, 32)}  # of another model
QUERY = ("layers.0.self_attn.q_proj", (128, 128))
HALVES = {
    f"model.{half}.{QUERY[0]}": QUERY[1] for half in ("decoder", "encoder.language_model")
}  # each is drawn anew, so they differ


@pytest.mark.parametrize(
    ("family", "shapes", "named"),
    [
        ("sdar", HEAD, "lm_head"),
        ("sdar", EMBEDDING, "embed_tokens"),
        ("sdar", SMALLER, "q_proj"),
        ("sdar-moe", EXPERT, "experts.0.gate_proj"),
        ("gemma", STACKED, "layers.0.experts"),
        ("gemma", CONDITIONING, "self_conditioning.gate_proj"),
        ("gemma", HALVES, "encoder.language_model.layers.0.self_attn.q_proj"),
    ],
)
def test_what_takes_no_adapter_is_refused_by_name(
    family: str, shapes: dict, named: str, case: Callable[[str], Case], tmp_path: Path
) -> None:
    adapter = asked(write_adapter(tmp_path / "wrong", shapes), 9)
    with pytest.raises(ValueError, match=named):
        case(family).engine().runner.add_lora(adapter)


def test_a_quantized_model_takes_adapters(
    checkpoint: Callable[..., Path], case: Callable[[str], Case], tmp_path: Path
) -> None:
    """An adapter that changes nothing, and one that does, on FP8 weights; but of no experts."""
    base = write_quantized(checkpoint(), tmp_path / "fp8", "fp8-dynamic")
    shapes = projections(checkpoint(), with_experts=False)
    nothing = asked(write_adapter(tmp_path / "nothing", shapes, scale=0.0), 1)
    something = asked(write_adapter(tmp_path / "something", shapes), 2)
    plain = get_engine(base).generate(CONTEXTS, GREEDY)
    engine = get_engine(base, **WITH_ADAPTERS)
    found = engine.generate(CONTEXTS, GREEDY, [nothing, None, something, nothing])
    assert [ours == theirs for ours, theirs in zip(found, plain, strict=True)] == [1, 1, 0, 1]
    experts = asked(write_adapter(tmp_path / "experts", projections(checkpoint())), 3)
    with pytest.raises(ValueError, match=r"layers\.0\.experts"):
        engine.runner.add_lora(experts)


@pytest.mark.parametrize("peft", ["0.19.0", "0.19.1"])
def test_matrices_of_all_experts_are_taken_apart(peft: str) -> None:
    """Before PEFT 0.19.1 they are those of the transposed weights. What is left out is 0."""
    count, rank, hidden, inner = 2, 3, 8, 5
    sizes = SimpleNamespace(
        hidden_dim_unpadded=hidden,
        intermediate_size_per_partition_unpadded=inner,
        moe_parallel_config=SimpleNamespace(tp_size=1),
    )
    layer = SimpleNamespace(base_layer=SimpleNamespace(moe_config=sizes), global_num_experts=count)
    names = [f"{one}.{part}" for one in range(count) for part in ("gate", "down", "up")]
    a, b = torch.randn(count, rank, hidden), torch.randn(count, 2 * inner, rank)
    first, second = (b.mT, a.mT) if peft == "0.19.0" else (a, b)
    matrices = first.reshape(count * rank, -1), second.permute(1, 2, 0).reshape(-1, rank * count)
    loras = {"experts.base_layer": LoRALayerWeights("", rank, 6, *matrices)}
    take_apart("experts", layer, names, loras)  # type: ignore[arg-type]
    assert sorted(loras) == sorted(names)
    for one in range(count):
        for name, rows in (("gate", b[one, :inner]), ("up", b[one, inner:])):
            found = loras[f"{one}.{name}"]
            assert torch.equal(found.lora_a, a[one]) and torch.equal(found.lora_b, rows)
            assert found.scaling == 2
        assert not loras[f"{one}.down"].lora_b.any()
        assert loras[f"{one}.down"].lora_b.shape == (hidden, rank)
