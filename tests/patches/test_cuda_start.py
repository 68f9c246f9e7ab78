"""What a CUDA server of a released model chooses and refuses at start, rehearsed without a GPU."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CUDAGraphMode

from dllm.patches.configure import LEAST_ASYNC_BLOCK
from dllm.patches.contract import (
    ASYNC_DRAFTING_SCHEDULER,
    ASYNC_SCHEDULER,
    DRAFTING_SCHEDULER,
    GPU_WORKER,
    REMOTE_SCHEDULER,
    SCHEDULER,
)
from dllm.patches.cuda_graphs import capture_sizes, keep_mixed_batches_out
from dllm.patches.drafting import DRAFTER_MODEL
from dllm.patches.drafts import REMOTE_DRAFTS
from dllm.patches.gpu_worker import CanvasGPURunner
from dllm.quantize import recipes
from dllm.settings.denoising import WHOLE_SEQUENCE
from tests.support.cuda_start import rehearse
from tests.support.process import ROOT
from tests.support.quant_checkpoints import OURS, quantization_config
from tests.support.released import GEMMA, released, write_configs

pytestmark = pytest.mark.slow

CANVAS, MOST_TOKENS = 256, 4096
GB_OF_VISION = 1.12  # of the released files; the vision tower is not made without torchvision
FORMATS = {
    "bf16": None,
    "fp8": recipes.quantization_config(recipes.MADE["fp8-dynamic"]),
    "nvfp4": quantization_config("nvfp4", OURS, {}),
    "modelopt": released(f"{GEMMA}-modelopt")["quantization_config"],
}
BLOCKS = {"llada2.0-mini": 32, "llada2.0-flash": 32, "sdar-1.7b-chat": 4}
USES_FLASH = {"bf16": True, "modelopt": False, "llada2.0-mini": False}
# --attention-backend, flash_attn_version and canvas window where vLLM brings FlashAttention 4; the
# backend and version that serve, None where that is refused.
BACKENDS = {
    (None, 3, "symmetric"): ["CUSTOM", 3],
    (None, None, "anchored"): ["CUSTOM", 4],  # the full layers
    ("CUSTOM", None, "symmetric"): ["CUSTOM", None],
    ("CUSTOM", 4, "symmetric"): ["CUSTOM", 4],  # configured once more
    ("TRITON_ATTN", None, "symmetric"): ["TRITON_ATTN", None],
    ("FLASH_ATTN", None, "symmetric"): ["FLASH_ATTN", 4],
    ("FLASH_ATTN", 3, "symmetric"): None,
    ("FLASH_ATTN", None, "anchored"): None,
}
EACH = range(1, MOST_TOKENS // CANVAS + 1)
# [requests, tokens, tokens of each]: canvases alone, then one head of a canvas's size among them.
ALONE = [[count, count * CANVAS, CANVAS] for count in EACH]
WITH_HEAD = [[count, (count + 1) * CANVAS, None] for count in EACH[:-1]]


REFUSED = {
    "FLASHINFER": (
        {"attention_backend": "FLASHINFER"},
        "--attention-backend FLASHINFER: allowed for diffusion models are CUSTOM, FLASH_ATTN",
    ),
    "FLASH_ATTN": ({"attention_backend": "FLASH_ATTN"}, "need FlashAttention 4"),
    "TRITON_ATTN": (
        {"attention_backend": "TRITON_ATTN", "hf_overrides": {"canvas_window": "anchored"}},
        "--attention-backend TRITON_ATTN has no anchored canvas window",
    ),
    "nvfp4 cache": (
        {"kv_cache_dtype": "nvfp4"},
        "--kv-cache-dtype nvfp4 (the flag's value, or what the checkpoint's quantization_config "
        "asks for): the kernels of diffusion models read 16-bit and FP8 numbers",
    ),
}
# A target with remote drafts.
REMOTE = {
    "speculative_config": {
        "method": "custom_class",
        "model": REMOTE_DRAFTS,
        "num_speculative_tokens": 4,
    },
    "additional_config": {"dllm": {"remote": {"workers": ["/nowhere/worker.sock"]}}},
}
RECORDS = {"additional_config": {"dllm": {"drafter": {"record": "/nowhere", "record_layers": [1]}}}}
DRAFTER = ROOT / "checkpoints/tiny-drafter"
THEIRS = "vllm.v1.core.sched.scheduler.Scheduler"
ADAPTIVE, LOOKUP = {"policy": "adaptive"}, {"policy": "adaptive", "prompt_lookup": True}
WIDTHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "narrow": ({"width": 2}, {}),
    "adaptive": (ADAPTIVE, {}),
    "adaptive, in turn": (ADAPTIVE, {"async_scheduling": False}),
    "adaptive, named scheduler": (ADAPTIVE, {"scheduler_cls": DRAFTING_SCHEDULER}),
    "adaptive, another scheduler": (ADAPTIVE, {"scheduler_cls": THEIRS}),
    "fixed, another scheduler": ({}, {"scheduler_cls": THEIRS}),
    "lookup": (LOOKUP, {}),
    "renewed": (ADAPTIVE | {"renew": "/nowhere"}, {}),
    "lookup, ahead": (LOOKUP, {"async_scheduling": True}),
}
# What a drafter may have that vLLM's class serves and ours does not.
SCALED = {"attention_value_scale": 2.0}
VLLMS_DRAFTER = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"
CHOSEN = {
    "few": {"max_num_seqs": 2},
    "tokens": {"max_num_batched_tokens": 1024},
    "sizes": {"cudagraph_capture_sizes": [256, 512]},
    "largest": {"max_cudagraph_capture_size": 1024},
    "eager": {"enforce_eager": True},
    "FULL": {"compilation_config": {"cudagraph_mode": "FULL"}},
    "FULL_DECODE_ONLY": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    "PIECEWISE": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "lora": {"enable_lora": True, "max_loras": 2},
}


@pytest.fixture(scope="module")
def on_h200(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Reports of all cases on an H200, by name."""
    folder = tmp_path_factory.mktemp("released")
    cases: dict[str, dict[str, Any]] = {}
    for name, quantization in FORMATS.items():
        model = write_configs(folder / name, GEMMA, quantization)
        cases[name] = {"model": str(model), "batches": ALONE + WITH_HEAD}
    for name, block in BLOCKS.items():
        batches = [[count, count * block, block] for count in range(1, 65)]
        cases[name] = {"model": str(write_configs(folder / name, name)), "batches": batches}
    for name, (flags, _) in REFUSED.items():
        cases[name] = {"model": cases["bf16"]["model"], "flags": flags}
    for name, flags in CHOSEN.items():
        cases[name] = {"model": cases["bf16"]["model"], "flags": flags}
    for name in USES_FLASH:
        cases[f"{name}, flash"] = {"model": cases[name]["model"], "flash": True}
    for backend, version, window in BACKENDS:
        attention = {"backend": backend, "flash_attn_version": version}
        flags = {"attention_config": attention, "hf_overrides": {"canvas_window": window}}
        cases[f"{backend} {version} {window}"] = cases["bf16, flash"] | {"flags": flags}
    target = str(ROOT / "checkpoints/tiny-ar")
    cases["remote"] = {"model": target, "flags": REMOTE}
    cases["remote, async"] = {"model": target, "flags": REMOTE | {"async_scheduling": True}}
    cases["records"] = {"model": target, "flags": RECORDS}
    cases["records, async"] = {"model": target, "flags": RECORDS | {"async_scheduling": True}}
    for name, flags in with_drafters(folder).items():
        cases[name] = {"model": target, "flags": flags}
    return dict(zip(cases, rehearse("h200", list(cases.values())), strict=True))


def with_drafters(folder: Path) -> dict[str, dict[str, Any]]:
    """Flags of a target: with a drafter, and with one that has SCALED; with an option, without."""
    scaled = json.loads((DRAFTER / "config.json").read_text())
    scaled["dflash_config"] |= SCALED
    (folder / "scaled").mkdir()
    (folder / "scaled/config.json").write_text(json.dumps(scaled))
    ours = {"additional_config": {"dllm": {"drafter": {}}}}
    found: dict[str, dict[str, Any]] = {}
    for name, path in (("drafter", DRAFTER), ("scaled drafter", folder / "scaled")):
        speculative = {"method": "dflash", "model": str(path), "num_speculative_tokens": 7}
        found[name] = {"speculative_config": speculative}
        found[f"our {name}"] = found[name] | ours
    for name, (policy, flags) in WIDTHS.items():
        options = {"additional_config": {"dllm": {"drafter": policy}}}
        found[name] = found["drafter"] | options | flags
    return found


@pytest.mark.parametrize("name", [*FORMATS, *BLOCKS])
def test_our_parts_are_chosen(on_h200, name):
    start = on_h200[name]
    assert start["attention"] == "CUSTOM" and start["non_causal"]
    is_async = BLOCKS.get(name, CANVAS) >= LEAST_ASYNC_BLOCK
    assert start["scheduler"] == (ASYNC_SCHEDULER if is_async else SCHEDULER)
    assert start["worker"] == GPU_WORKER
    assert start["max_num_seqs"] == 64
    # All canvases and 2,048 tokens of a prompt; vLLM's default for this GPU is 8,192.
    assert start["max_num_batched_tokens"] == max(64 * BLOCKS.get(name, CANVAS) + 2048, 8192)


@pytest.mark.parametrize(("name", "uses_it"), USES_FLASH.items())
def test_flash_attention_serves_where_the_table_says(on_h200, name, uses_it):
    """Not without it, not from an FP8 cache, and no blocks."""
    start = on_h200[f"{name}, flash"]
    assert (start["attention"], start["flash_attn_version"]) == ("CUSTOM", 4 if uses_it else None)
    assert on_h200[name]["flash_attn_version"] is None
    for each, is_there in ((start, uses_it), (on_h200[name], False)):
        assert any("FlashAttention 4" in text for text in each["doctor"]) is is_there
        has_fp8 = "float8" in str(each["doctor"])
        assert each["doctor"] and has_fp8 is str(each["cache_dtype"]).startswith("fp8")


@pytest.mark.parametrize(("given", "chosen"), BACKENDS.items())
def test_a_user_may_choose_another_backend(on_h200, given, chosen):
    start = on_h200["{} {} {}".format(*given)]
    if chosen is None:
        assert "--attention-backend FLASH_ATTN" in start["refusal"]
    else:
        assert [start["attention"], start["flash_attn_version"]] == chosen


@pytest.mark.parametrize(
    ("name", "method", "cache", "released_gb"),
    [
        ("bf16", None, "auto", 51.6476),
        ("fp8", "compressed-tensors", "auto", 27.1977),
        ("modelopt", "modelopt_fp4", "fp8_e4m3", 18.8181),
    ],
)
def test_the_weights_are_as_large_as_the_released_files(on_h200, name, method, cache, released_gb):
    """Their sizes: file id 68342975742 of the index of public GitHub files."""
    start = on_h200[name]
    assert (start["quantization"], start["cache_dtype"]) == (method, cache)
    assert start["gigabytes"] + GB_OF_VISION == pytest.approx(released_gb, abs=0.03)


def test_nvfp4_of_all_layers_is_smaller_than_of_experts_alone(on_h200):
    assert on_h200["nvfp4"]["quantization"] == "compressed-tensors"
    assert on_h200["nvfp4"]["gigabytes"] < on_h200["modelopt"]["gigabytes"]


@pytest.mark.parametrize("name", FORMATS)
def test_the_kv_cache_has_six_groups_with_pages_of_the_same_bytes(on_h200, name):
    groups = on_h200[name]["groups"]
    assert [group["layers"] for group in groups] == [5] * 6
    assert [group["spec"] for group in groups] == ["SlidingWindowSpec"] * 5 + ["FullAttentionSpec"]
    item = 1 if name == "modelopt" else 2  # bytes of a number
    for group in groups[:5]:  # 8 heads of 256, keys and values
        assert group["page_bytes"] == group["page_size"] * 8 * 256 * 2 * item
    full = groups[5]  # 2 heads of 512
    assert full["page_bytes"] == full["page_size"] * 2 * 512 * 2 * item
    assert len({group["page_bytes"] for group in groups}) == 1


@pytest.mark.parametrize(("name", "block"), BLOCKS.items())
def test_pages_hold_whole_blocks(on_h200, name, block):
    (group,) = on_h200[name]["groups"]
    assert group["spec"] == "FullAttentionSpec"
    assert group["layers"] == released(name)["config"]["num_hidden_layers"]
    assert group["page_size"] % block == 0


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_each_number_of_canvases_has_a_full_graph(on_h200, name):
    """Without padding; a head among them makes a graph in pieces of it, without padding, too."""
    graphs = on_h200[name]["graphs"]
    assert graphs[: len(ALONE)] == [["FULL", tokens, count] for count, tokens, _ in ALONE]
    assert graphs[len(ALONE) :] == [["PIECEWISE", tokens, None] for _, tokens, _ in WITH_HEAD]


@pytest.mark.parametrize(("name", "block"), BLOCKS.items())
def test_blocks_have_full_graphs_for_all_requests(on_h200, name, block):
    for count, (mode, tokens, requests) in enumerate(on_h200[name]["graphs"], start=1):
        assert mode == "FULL" and tokens == requests * block
        assert count <= requests <= max(count, count * 9 / 8)


def test_a_user_may_choose_other_graphs(on_h200):
    assert on_h200["few"]["graph_sizes"][-1] == 2 * 2 * CANVAS
    assert on_h200["few"]["max_num_batched_tokens"] == 8192
    assert on_h200["tokens"]["max_num_batched_tokens"] == 1024
    assert on_h200["sizes"]["graph_sizes"] == [256, 512]
    assert on_h200["largest"]["graph_sizes"][-1] == 1024
    assert (on_h200["eager"]["graph_mode"], on_h200["eager"]["graph_sizes"]) == ("NONE", [])
    assert on_h200["lora"]["scheduler"] == ASYNC_SCHEDULER
    assert on_h200["FULL"]["graph_mode"] == "FULL_AND_PIECEWISE"  # no prompt is in a full graph
    for mode in ("FULL_DECODE_ONLY", "PIECEWISE"):
        assert on_h200[mode]["graph_mode"] == mode
    assert on_h200["TRITON_ATTN None symmetric"]["graph_mode"] == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize("canvas", [4, 32, 256, 1000])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 64, 500])
@pytest.mark.parametrize("budget", [1000, 8192])
def test_sizes_are_whole_canvases_and_halves_of_one(canvas, max_num_seqs, budget):
    sizes = capture_sizes(canvas, max_num_seqs, budget)
    assert all(small < large for small, large in pairwise(sizes))
    assert sizes[-1] <= min(budget, max(MOST_TOKENS, canvas), 2 * max_num_seqs * canvas)
    whole = [size for size in sizes if size >= canvas]
    assert whole[0] == canvas and all(size % canvas == 0 for size in whole)
    assert all(large - small <= max(canvas, large / 8) for small, large in pairwise(whole))
    assert all(canvas // size >= 2 for size in sizes if size < canvas)


@pytest.mark.parametrize(
    ("given", "kept", "kept_of_whole_sequences"),
    [
        ("FULL", "FULL_DECODE_ONLY", "NONE"),
        ("FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE", "PIECEWISE"),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE"),
        ("NONE", "NONE", "NONE"),
    ],
)
def test_a_mode_that_vllm_sets_later_has_no_full_graphs_of_prompts(
    given: str, kept: str, kept_of_whole_sequences: str
) -> None:
    for size, expected in ((None, kept), (WHOLE_SEQUENCE, kept_of_whole_sequences)):
        compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode[given])
        model = SimpleNamespace(hf_config=SimpleNamespace(block_size=size))
        config = SimpleNamespace(compilation_config=compilation, model_config=model)
        keep_mixed_batches_out(config)
        assert compilation.cudagraph_mode == CUDAGraphMode[expected]


@pytest.mark.parametrize(
    ("drafts", "reads", "block_size", "expected"),
    [
        ([CANVAS, CANVAS], [], 1, CANVAS),  # canvases alone
        ([0, CANVAS], [], 1, CANVAS),  # an emitted block alone is one sequence, too
        ([CANVAS // 2, CANVAS], [], 1, None),  # a head, and a narrow canvas behind it
        ([3, CANVAS], [], CANVAS, CANVAS),  # a tail and a canvas, in one block
        ([3, CANVAS], [0], CANVAS, CANVAS),  # the tail is of a prompt
        ([3, 0], [0, 1], CANVAS, None),  # a prompt goes on
    ],
)
def test_a_causal_span_with_a_canvas_is_in_no_full_graph(
    monkeypatch, drafts, reads, block_size, expected
):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner = object.__new__(CanvasGPURunner)
    settings = SimpleNamespace(block_size=block_size)
    runner.model_state = SimpleNamespace(algorithm=SimpleNamespace(settings=settings))
    state = SimpleNamespace(
        num_draft_tokens_np=np.array(drafts),
        num_scheduled_tokens=np.array([CANVAS, CANVAS]),
        is_prefilling_np=np.isin([0, 1], reads),
    )
    theirs = state, None if reads else CANVAS
    gathered = lambda self, scheduler_output, dummy_run: theirs  # noqa: E731
    monkeypatch.setattr(GPUModelRunner, "gather_batch_req_state", gathered)
    assert runner.gather_batch_req_state(None, False) == (state, expected)


# --- refusals and other GPUs ----------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(on_h200, name):
    assert REFUSED[name][1] in on_h200[name]["refusal"]


def test_a_drafter_is_vllms_unless_an_option_asks_for_ours(on_h200):
    for name in ("drafter", "scaled drafter"):
        start = on_h200[name]
        assert start["drafter"] == VLLMS_DRAFTER
        assert start["scheduler"] is None and start["worker"].startswith("vllm.")
    ours = on_h200["our drafter"]
    assert (ours["drafter"], ours["worker"]) == (DRAFTER_MODEL, GPU_WORKER)
    assert "attention_value_scale" in on_h200["our scaled drafter"]["refusal"]


def test_widths_are_chosen_ahead_unless_an_option_waits_for_each_step(on_h200):
    for name, scheduler, is_async in (
        ("our drafter", ASYNC_DRAFTING_SCHEDULER, True),
        ("narrow", ASYNC_DRAFTING_SCHEDULER, True),
        ("adaptive", ASYNC_DRAFTING_SCHEDULER, True),
        ("adaptive, in turn", DRAFTING_SCHEDULER, False),
        ("adaptive, named scheduler", DRAFTING_SCHEDULER, False),
        ("fixed, another scheduler", THEIRS, True),
        ("lookup", DRAFTING_SCHEDULER, False),
        ("renewed", DRAFTING_SCHEDULER, False),
    ):
        start = on_h200[name]
        assert (start["scheduler"], start["async"]) == (scheduler, is_async), name
    assert "--async-scheduling: drafts are looked up" in on_h200["lookup, ahead"]["refusal"]
    refusal = on_h200["adaptive, another scheduler"]["refusal"]
    assert f"--scheduler-cls {THEIRS}" in refusal and DRAFTING_SCHEDULER in refusal


def test_remote_drafts_have_no_asynchronous_scheduling(on_h200):
    """A diffusion model's default is on, and so is that of a target without drafts."""
    start = on_h200["remote"]
    assert (start["scheduler"], start["worker"]) == (REMOTE_SCHEDULER, GPU_WORKER)
    assert start["async"] is False and on_h200["bf16"]["async"] is True
    assert "--async-scheduling: the host decides" in on_h200["remote, async"]["refusal"]


def test_texts_that_are_recorded_are_scheduled_synchronously(on_h200):
    """Else a step behind the end of a text would be recorded, too."""
    start = on_h200["records"]
    assert (start["worker"], start["async"]) == (GPU_WORKER, False)
    assert "--async-scheduling: whether a text" in on_h200["records, async"]["refusal"]


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
def test_other_gpus(tmp_path, gpu):
    """An A100 cannot read the FP8 cache that one of the checkpoints asks for."""
    cases: dict[str, dict[str, Any]] = {}
    for name, quantization in FORMATS.items():
        model = write_configs(tmp_path / name, GEMMA, quantization)
        cases[name] = {"model": str(model), "batches": ALONE, "flash": True}
    cases["16-bit cache"] = cases["modelopt"] | {"flags": {"kv_cache_dtype": "bfloat16"}}
    starts = dict(zip(cases, rehearse(gpu, list(cases.values())), strict=True))
    if gpu == "a100":
        refusal = starts.pop("modelopt")["refusal"]
        assert "--kv-cache-dtype fp8_e4m3" in refusal and "this one has 8.0" in refusal
        assert "Use --kv-cache-dtype bfloat16" in refusal
    for start in starts.values():
        assert start["attention"] == "CUSTOM"
        is_hopper_16_bit = gpu == "h100" and start["cache_dtype"] != "fp8_e4m3"
        assert start["flash_attn_version"] == (4 if is_hopper_16_bit else None)
        # vLLM's default for an A100 is 2,048 tokens, eight canvases.
        assert start["max_num_batched_tokens"] == 64 * CANVAS + 2048
        assert start["graphs"] == [["FULL", tokens, count] for count, tokens, _ in ALONE]
