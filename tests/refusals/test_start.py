"""What a server is refused for when it starts: flags, options and values of checkpoints.

``START`` has all of it, as (checkpoint, flags, what the message says); the values that an option
may have are in ``test_options``. Weights that do not fit are tested with what loads them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from dllm.models import REFUSED
from dllm.patches.contract import CPU_WORKER, REMOTE_SCHEDULER
from dllm.patches.cpu import is_cpu_without_triton
from dllm.patches.drafts import REMOTE_DRAFTS, SELF_DRAFTER
from tests.cpu.test_kernel_list import REFUSED as WITHOUT_KERNELS
from tests.support.edited import with_fields
from tests.support.engine_harness import DEFAULTS, Engine
from tests.support.family_checkpoints import WHOLE_SEQUENCES
from tests.support.process import ROOT

CHECKPOINTS = ROOT / "checkpoints"
VLLMS_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
VLLMS_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
Flags = dict[str, Any]


class Changed(NamedTuple):
    """A bundled checkpoint with other values in one of its files; None removes a field."""

    name: str
    changes: dict[str, Any]
    file: str = "config.json"


def resolved(value: Any, folder: Path) -> Any:
    """A value of a row; checkpoints become paths."""
    if isinstance(value, Changed):
        source, target = CHECKPOINTS / value.name, folder / "changed"
        return str(with_fields(source, target, value.file, **value.changes))
    if isinstance(value, dict):
        return {key: resolved(each, folder) for key, each in value.items()}
    return value


def options(**of_plugin: Any) -> Flags:
    return {"additional_config": {"dllm": of_plugin}}


def drafter(**of_drafter: Any) -> Flags:
    return options(drafter=of_drafter)


def generation(**values: Any) -> Flags:
    return {"override_generation_config": values}


def drafts(method: str, **more: Any) -> Flags:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 5} | more}


def dflash(of_drafter: Any = None, **more: Any) -> Flags:
    """Drafting with tiny-drafter, or with other values in its config.json."""
    model = Changed("tiny-drafter", of_drafter) if of_drafter else f"{CHECKPOINTS}/tiny-drafter"
    return drafts("dflash", model=model, **more)


def remote(**of_drafts: Any) -> Flags:
    """Drafts of a worker that is not there, with these options."""
    given = {"workers": ["/nowhere/worker.sock"]} | of_drafts
    return drafts("custom_class", model=REMOTE_DRAFTS) | options(remote=given)


def uno(folder: str, **more: Any) -> Flags:
    return drafts("uno", uno_lora_path=folder, uno_mask_token_id=300) | more


NGRAM = drafts("ngram", prompt_lookup_max=3)
SMALL = drafts("draft_model", model=f"{CHECKPOINTS}/tiny-ar")
ITSELF = options(decoding="self_speculation")
SPLIT = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
TWO = {"tensor_parallel_size": 2}
RECORD = {"record": "/nowhere", "record_layers": [1, 3]}
BLOCKS_OF_24 = Changed("tiny-sdar", {"block_size": 24})
OF_MODEL = r"not of this model; .*"
BOUND = OF_MODEL + r'\{"sampler_config": \{"entropy_bound": 0.5\}\}'

CANVASES: list[tuple[Flags, str]] = [  # of tiny-dllm, whose canvases have 32 tokens
    (generation(t_max=-2), "t_max = -2; allowed: "),
    (generation(entropy_bound=0.5), f"--override-generation-config: entropy_bound: {BOUND}"),
    (generation(t_maxx=0.7, top_k=9), f"--override-generation-config: t_maxx: {BOUND}"),
    ({"diffusion_config": {"canvas_length": 16, "max_denoising_steps": 0}},
     "max_denoising_steps = 0; allowed: "),
    (options(context_cache="never"), "context_cache = 'never'; allowed: "),
    ({"max_num_batched_tokens": 31}, "--max-num-batched-tokens 31 .* at least 32"),
    ({"long_prefill_token_threshold": 8}, "--long-prefill-token-threshold 8 .* at least 32"),
    ({"async_scheduling": True}, "--async-scheduling does not work: .* Leave the flag out"),
    ({"scheduler_cls": "a.B"}, r"--scheduler-cls a\.B: .*CanvasScheduler"),
    (NGRAM, "--speculative-config does not work .* Leave it out"),
    ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size does not work .* Leave it out"),
    ({"prefill_context_parallel_size": 2}, "--prefill-context-.* does not work"),
    ({"enable_batch_sharded_sampling": True} | TWO, "--enable-batch-sharded-sampling does not wo"),
    ({"enable_dbo": True}, "--enable-dbo .* does not work .* Leave it out"),
    ({"ubatch_size": 2}, "--ubatch-size above 1.* does not work .* Leave it out"),
    ({"structured_outputs_config": {"backend": "guidance"}},
     "--structured-outputs-config.backend does not work .* xgrammar"),
    ({"data_parallel_size": 2, "enable_expert_parallel": True},
     "--enable-expert-parallel with --data-parallel-size: .* Leave the flag out"),
    ({"data_parallel_size": 2, "data_parallel_rank": 0},
     "--data-parallel-rank, .*: on a CPU replicas share nothing"),
    (drafter(record="/nowhere"), "record = '/nowhere' does nothing"),
    (drafter(window=9), "window = 9 does nothing"),
]  # fmt: skip
BLOCKS: list[tuple[Flags, str]] = [  # of a model with blocks of 24 tokens
    ({"block_size": 32}, "--block-size 32: .* Allowed: a multiple of 24"),
    ({"prefix_match_unit": 16}, "--prefix-match-unit 16: .* Allowed: a multiple of 24"),
    ({"max_num_batched_tokens": 23}, "--max-num-batched-tokens 23 .* at least 24"),
    ({"diffusion_config": {"canvas_length": 12}},
     "--diffusion-config: canvas_length = 12; allowed: 24, the model's block_size"),
    (generation(remasking_strategy="random"),
     "remasking_strategy = 'random'; allowed: 'low_confidence_static', "),
    (generation(threshold=1.5), "threshold = 1.5; allowed: less than"),
    (generation(editing=1),
     "--override-generation-config: editing: not of this model; allowed: max_denoising"),
    (generation(mode="speed"), f"mode: {OF_MODEL}allowed: "),
    (generation(treshold=0.5), f"treshold: {OF_MODEL}allow"),
    (options(context_cache="block"), "context_cache = 'block'; allowed: 'none'"),
    (options(decoding="ar"), "has one way to decode"),
]  # fmt: skip
DRAFTED: list[tuple[Flags, str]] = [  # of tiny-ar, which has drafts
    (dflash() | {"worker_cls": VLLMS_WORKER}, "--worker-cls vllm.*: drafting with .* needs"),
    (dflash() | {"enable_lora": True}, "--enable-lora does not work with drafting"),
    (dflash(rejection_sample_method="block") | drafter(verification="rejection"),
     "'block'; allowed: 'standard': which drafts are kept is said by"),
    *((dflash(rejection_sample_method=kind, **more), f"'{kind}'; allowed: 'standard'")
      for kind, more in (("block", {}), ("synthetic", {"synthetic_acceptance_rates": [0.5] * 5}))),
    (dflash(kv_cache_dtype="turboquant_k8v4"),
     "'turboquant_k8v4'.*fp8_e4m3.*Leave it out"),
    (dflash({"target_hidden_size": 96}), "size 96"),
    (dflash() | drafter(width=9), "width = 9"),
    (dflash() | drafter(fused_context=True), "fused_context on a CPU"),
    (dflash() | drafter(mask_token_id=3), "ambiguous"),
    (dflash() | drafter(mask_token_id="a"), r"ambiguous: .* 'a' = \d+"),
    (dflash() | drafter(mask_token_id="<no>"), "'<no>' is not one token"),
    (dflash() | drafter(**RECORD), r"record_layers = \[.*it is for recording"),
    (SMALL | drafter(window=9), "window = 9 does nothing"),
    (SMALL | drafter(mask_token_id=9), "mask_token_id = 9 does nothing"),
    (SMALL | drafter(policy="pilot", pilot="file"), "pilot = 'file' does nothing"),
    (SMALL | drafter(denoise_steps=2), "denoise_steps = 2"),
    (SMALL | drafter(record="folder"), 'record with the draft source "draft_model"'),
    (SMALL | drafter(renew="folder"), "renew = 'folder'.* is for drafting with a DFlash drafter"),
    (SMALL | drafter(width=9), "width = 9"),
    (SMALL | drafter(policy="adaptive") | {"enable_lora": True}, "--enable-lora does not work"),
    (drafts("draft_model", model=f"{CHECKPOINTS}/tiny-ar", use_local_argmax_reduction=True)
     | drafter(policy="adaptive"), "argmax_reduction"),
    (drafts("draft_model", model=f"{CHECKPOINTS}/tiny-ar", rejection_sample_method="block")
     | drafter(), "'block'; allowed: 'standard'"),
    (NGRAM | drafter(), "'ngram'.*allowed: draft_model"),
    (drafts("ngram", prompt_lookup_max=3, draft_sample_method="probabilistic")
     | drafter(policy="adaptive", prompt_lookup=True), "looked up are not drawn"),
    (NGRAM | {"worker_cls": CPU_WORKER}, "'ngram' with the worker dllm"),
    (NGRAM | {"worker_cls": CPU_WORKER} | drafter(record="/nowhere"), "method = 'ngram' with"),
    (drafts("custom_class", model=SELF_DRAFTER), "does not draft for itself"),
    (uno(""), "without uno_lora_path"),
    (uno("nowhere"), "there is no .*adapter_config.json"),
    (uno("nowhere", enable_lora=True), "--enable-lora"),
    (remote(workers=["tcp://10.0.0.3:5800"]), "10.0.0.3.*draft-keys"),
    (remote(policy="fixed", width=9), "width = 9.*0 to 5"),
    (remote(keys="/nowhere"), "/nowhere/key.pem"),
    (remote() | {"scheduler_cls": VLLMS_SCHEDULER}, REMOTE_SCHEDULER),
    (options(remote={"workers": ["/nowhere/worker.sock"]}), "Give both or none"),
    (drafts("custom_class", model=REMOTE_DRAFTS), "name draft workers"),
    (remote() | options(remote={"workers": ["/nowhere/w.sock"]}, drafter={"policy": "adaptive"}),
     "policy = 'adaptive' does nothing"),
]  # fmt: skip
ALONE: list[tuple[Flags, str]] = [  # of tiny-ar, which has none
    (drafter(policy="adaptive"), "policy = 'adaptive' does nothing"),
    (drafter(width=1), "width = 1 does nothing"),
    (drafter(renew="/nowhere"),
     "renew = '/nowhere' does nothing .* it is for drafting with a DFlash drafter. Leave"),
    (drafter(record="/nowhere"), "Name the layers of the target"),
    (drafter(**RECORD | {"record_layers": [1, 5]}), "the target has 5 layers; allowed: 0 to 4"),
    (drafter(**RECORD) | {"worker_cls": VLLMS_WORKER}, "recording needs dllm"),
]  # fmt: skip
BOTH_WAYS: list[tuple[Flags, str]] = [  # of tiny-nemotron, which decodes in three ways
    (options(decoding="both"), "decoding"),
    (options(decoding="self_speculation", drafter={"window": 9}), "window"),
    (options(decoding="self_speculation", drafter={"adapter": "nowhere"}),
     "there is no .*adapter_config.json"),
    (ITSELF | SPLIT, "--decode-context-parallel-size"),
    (ITSELF | NGRAM, "--speculative-config"),
    (ITSELF | {"enable_lora": True}, "--enable-lora"),
    (options(decoding="ar") | {"enable_lora": True}, "--enable-lora"),
    (options(decoding="ar") | {"hf_overrides": lambda config: config},
     "hf_overrides that are a function"),
    (options(decoding="ar") | NGRAM, "'ngram' with the worker dllm.*leave --speculative-config"),
]  # fmt: skip
WHOLE: list[tuple[Flags, str]] = [  # of models all of whose tokens see each other
    ({"max_num_batched_tokens": 256}, "--max-num-batched-tokens"),
    ({"long_prefill_token_threshold": 100}, "--long-prefill-token-threshold"),
    ({"hf_overrides": {"rope": False, "use_sliding_window": True}}, "rope|use_sliding_window"),
]
WORKERS: list[tuple[Flags, str]] = [  # what CPUs have no kernels for, with our worker by name
    (SPLIT, "--decode-context-parallel-size"),
    ({"enable_batch_sharded_sampling": True} | TWO, "--enable-batch-sharded-sampling"),
    ({"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"},
     "--return-sampling-mask"),
    ({"enable_trace_replay": True}, "--enable-trace-replay"),
    ({"watermark_config": {"key": 1}}, "--watermark-config"),
    (drafts("ngram_gpu"), "--speculative-config"),
]  # fmt: skip
CONFIGS: list[tuple[Changed, str]] = [
    *((Changed("tiny-dllm", changes, "generation_config.json"), said) for changes, said in (
        ({"t_max": "warm"}, "t_max = 'warm'; allowed: "),
        ({"sampler_config": None}, "sampler_config = None; allowed: a mapping"),
        ({"t_min": None}, "generation config: t_min is missing"))),
    (Changed("tiny-dllm", {"canvas_window": "sideways"}),
     "canvas_window = 'sideways'; allowed: 'symmetric' or 'anchored'"),
    *((Changed("tiny-sdar", changes), said) for changes, said in (
        ({"block_size": None}, "block_size is missing, .* --hf-overrides '"),
        ({"mask_token_id": 151669}, "mask_token_id = 151669; allowed: a token id below"),
        ({"use_sliding_window": True}, "layers with a sliding window; allowed: full"),
        ({"layer_types": ["sliding_attention"] * 5}, "layers with a sliding window"))),
    *((Changed("tiny-llada2", changes), said) for changes, said in (
        ({"expert_capacity": 48, "delete_token_id": 5}, r"this is a LLaDA2\.2, which"),
        ({"delete_token_id": 0}, r"delete_token_id: this is a LLaDA2\.2, which"))),
    *((Changed("tiny-sdar", {"model_type": kind, "architectures": ["Other"]}),
       f"'{kind}' is not served: its .* Allowed: the a") for kind in sorted(REFUSED)),
]  # fmt: skip
START = [
    *(("tiny-dllm", *row) for row in CANVASES),
    *((BLOCKS_OF_24, *row) for row in BLOCKS),
    ("tiny-sdar", options(context_cache="block"), "context_cache = 'block'; allowed: 'none'"),
    ("tiny-llada2", generation(mode="fast"), "mode = 'fast'; allowed: one of plain, quality, spe"),
    *(("tiny-ar", *row) for row in DRAFTED + ALONE),
    *(("tiny-nemotron", *row) for row in BOTH_WAYS),
    *((model, *row) for model in ("llada", "dream") for row in WHOLE),
    *(("tiny-ar", {"worker_cls": CPU_WORKER} | flags, said) for flags, said in WORKERS),
    *((model, {}, said) for model, said in CONFIGS),
]


@pytest.mark.skipif(not is_cpu_without_triton(), reason="a GPU, or a CPU with Triton")
@pytest.mark.parametrize(("model", "flags", "said"), START)
def test_it_is_refused(
    tmp_path: Path, family: Callable[[str], Path], model: Any, flags: Flags, said: str
) -> None:
    load_general_plugins()
    flags = DEFAULTS | resolved(flags, tmp_path)
    if isinstance(model, str):
        path = family(model) if model in WHOLE_SEQUENCES else CHECKPOINTS / model
    else:
        path = resolved(model, tmp_path / "model")
    with pytest.raises(ValueError, match=f"(?s){said}"):
        EngineArgs(str(path), **flags).create_engine_config()
        Engine(path, **flags)


def test_every_flag_without_a_kernel_of_a_cpu_has_a_row() -> None:
    flags = {name for name in WITHOUT_KERNELS.values() if name.startswith("--")}
    assert flags == {said for _, said in WORKERS}
