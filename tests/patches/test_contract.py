"""Contracts with vLLM: when one of these fails, vLLM has moved and ``dllm/patches`` must follow.

The signatures were read from vLLM 0.32.0. Most lists are not written down twice: what our code
calls, overrides and reads is taken from our code itself and compared with what vLLM has.
"""

import ast
import asyncio
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError

from dllm import LOGGER
from dllm.patches import contract, install, neighbours
from tests.support.engine_harness import get_engine  # sets vLLM's environment first
from tests.support.process import run_python

# What vLLM's plugin loader does; tests that start no engine need it, too.
install.install(serve_with_dllm=True)

ROOT = Path(__file__).parents[2]
COMPRESSED = "vllm.model_executor.layers.quantization.compressed_tensors"
SOURCES = sorted(
    path for folder in ("dllm", "attention", "quant") for path in (ROOT / folder).rglob("*.py")
)


def resolve(target: str) -> Any:
    """The object behind a dotted name: the longest importable module, then attributes."""
    parts = target.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"{target} does not exist")


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def trees(*names: str) -> Iterator[ast.AST]:
    """The syntax trees of our modules (all of them, or those of these paths)."""
    for path in SOURCES:
        if not names or str(path.relative_to(ROOT)) in names:
            yield ast.parse(path.read_text())


def attributes_read(of: str, *files: str) -> set[str]:
    """Attributes that our code reads of a variable, or of an attribute, called ``of``."""
    return {
        node.attr
        for tree in trees(*files)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "id", getattr(node.value, "attr", None)) == of
    }


def keywords_of_calls(to: str, *files: str) -> set[str]:
    """Keywords with which our code calls a function of that name."""
    return {
        keyword.arg
        for tree in trees(*files)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", None)) == to
        for keyword in node.keywords
        if keyword.arg
    }


# --- the two tables -------------------------------------------------------------------------------

# What a patched function must look like. In this process ours have replaced them, with the same
# parameters, so the originals are read from the source text below.
SIGNATURES = {
    "vllm.ModelRegistry.register_model": ["model_arch", "model_cls"],
    "vllm.v1.attention.backends.registry.register_backend": [
        "backend",
        "class_path",
        "is_mamba",
    ],
    "vllm.multimodal.MULTIMODAL_REGISTRY.register_processor": [
        "self",
        "processor",
        "info",
        "dummy_inputs",
    ],
    "vllm.engine.arg_utils.EngineArgs.create_engine_config": ["self", "usage_context", "headless"],
    "vllm.engine.arg_utils.EngineArgs._set_default_max_num_seqs_and_batched_tokens_args": [
        "self",
        "usage_context",
        "model_config",
        "parallel_config",
    ],
    "vllm._custom_ops.weight_packed_linear_cpu": ["x", "packed_weight", "n", "bias"],
    "vllm.sampling_params.SamplingParams._validate_diffusion": ["self", "model_config"],
    "vllm.v1.engine.input_processor.InputProcessor._validate_params": [
        "self",
        "params",
        "supported_tasks",
    ],
    "vllm.v1.engine.input_processor.InputProcessor.process_inputs": [
        "self",
        "request_id",
        "prompt",
        "params",
        "supported_tasks",
        "arrival_time",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "resumable",
        "session_id",
        "kv_hints",
    ],
    "vllm.multimodal.registry.MultiModalRegistry.create_processor": [
        "self",
        "model_config",
        "tokenizer",
    ],
    "vllm.v1.engine.async_llm.AsyncLLM.generate": [
        "self",
        "prompt",
        "sampling_params",
        "request_id",
        "prompt_text",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "session_id",
        "kv_hints",
        "reasoning_ended",
        "reasoning_parser_kwargs",
    ],
    "vllm.sampling_params.SamplingParams._validate_structured_outputs": [
        "self",
        "model_config",
        "structured_outputs_config",
        "tokenizer",
    ],
    "vllm.v1.engine.async_llm.AsyncLLM.add_request": [
        "self",
        "request_id",
        "prompt",
        "params",
        "arrival_time",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "session_id",
        "prompt_text",
        "reasoning_ended",
        "reasoning_parser_kwargs",
        "kv_hints",
    ],
    "vllm.v1.engine.llm_engine.LLMEngine.add_request": [
        "self",
        "request_id",
        "prompt",
        "params",
        "arrival_time",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "session_id",
        "prompt_text",
        "kv_hints",
    ],
    "vllm.v1.engine.core_client.AsyncMPClient.get_output_async": ["self"],
    "vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat.create_chat_completion": [
        "self",
        "request",
        "raw_request",
    ],
    "vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion.create_completion": [
        "self",
        "request",
        "raw_request",
    ],
    "vllm.entrypoints.openai.chat_completion.batch_serving.OpenAIServingChatBatch"
    ".create_batch_chat_completion": [
        "self",
        "request",
        "raw_request",
    ],
    "vllm.entrypoints.openai.responses.serving.OpenAIServingResponses.create_responses": [
        "self",
        "request",
        "raw_request",
    ],
    "vllm.entrypoints.scale_out.token_in_token_out.serving.ServingTokens.serve_tokens": [
        "self",
        "request",
        "raw_request",
    ],
    "vllm.plugins.load_endpoint_plugins": ["supported_tasks"],
    "vllm.renderers.base.BaseRenderer.validate_token_ids": ["self", "token_ids", "parameter"],
    "vllm.entrypoints.generate.beam_search.online.BeamSearchOnlineMixin.beam_search": [
        "self",
        "prompt",
        "request_id",
        "params",
        "lora_request",
        "trace_headers",
        "session_id",
    ],
    "vllm.config.VllmConfig._get_quantization_config": ["model_config", "load_config"],
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update": [
        "self",
        "layer",
        "key",
        "value",
        "kv_cache",
        "slot_mapping",
    ],
    "vllm.config.VllmConfig.try_verify_and_update_config": ["self"],
    "vllm.sampling_params.SamplingParams._validate_spec_decode": ["self", "speculative_config"],
    "vllm.v1.worker.gpu.model_runner.init_speculator": ["vllm_config", "device", "req_states"],
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.take_draft_token_ids": ["self"],
    "vllm.config.VllmConfig._get_v2_model_runner_unsupported_features": ["self"],
    "vllm.v1.engine.core.EngineCore.post_step": ["self", "model_executed"],
    "vllm.v1.engine.core.EngineCoreProc.run_busy_loop": ["self"],
    "vllm.v1.engine.core.EngineCoreProc.run_engine_core": ["dp_rank", "local_dp_rank"],
    "vllm.v1.executor.multiproc_executor.WorkerProc.worker_main": [],
    "vllm.v1.engine.coordinator.DPCoordinatorProc.run_coordinator": [
        "engine_count",
        "front_publish_address",
        "back_output_address",
        "back_publish_address",
        "zmq_addr_pipe",
        "min_stats_update_interval_ms",
        "enable_wave_coordination",
        "logging_config",
    ],
    "vllm.entrypoints.launchers.launcher.watchdog_loop": ["server", "engine"],
    "vllm.v1.engine.utils.zmq_socket_ctx": [
        "path",
        "socket_type",
        "bind",
        "linger",
        "identity",
        "router_handover",
    ],
    "vllm.v1.engine.core_client.AsyncMPClient._call_utility_async": [
        "self",
        "method",
        "engine",
    ],
    "vllm.v1.metrics.loggers.StatLoggerManager.record": [
        "self",
        "scheduler_stats",
        "iteration_stats",
        "mm_cache_stats",
        "engine_idx",
    ],
    "vllm.config.VllmConfig.use_v2_model_runner": ["self"],
    "vllm.config.VllmConfig._validate_v2_model_runner": ["self"],
    "vllm.triton_utils.dispatcher.register_kernels": ["overrides"],
    "vllm.tool_parsers.structural_tag_registry.register_vllm_structural_tag": [
        "model",
        "builtin_tools",
    ],
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner._dummy_sampler_run": ["self", "hidden_states"],
    "vllm.v1.worker.gpu.sample.prompt_logprob.PromptLogprobsWorker.compute_prompt_logprobs": [
        "self",
        "logits_fn",
        "hidden_states",
        "input_batch",
        "all_token_ids",
        "num_computed_tokens",
        "prompt_lens",
    ],
    "vllm.platforms.cpu.CpuPlatform.check_and_update_config": ["cls", "vllm_config"],
    "vllm.compilation.decorators._try_load_aot_compiled_fn": ["model", "aot_compilation_path"],
}
OBJECTS = {  # not functions
    "vllm.v1.worker.gpu.model_runner.RejectionSampler": type,
    "vllm.model_executor.models.config.MODELS_CONFIG_MAP": dict,
    "vllm.triton_utils.triton.next_power_of_2": object,
    "vllm.tool_parsers.gemma4_engine_tool_parser.Gemma4EngineToolParser.structural_tag_model": str
    | None,
}
FROM_LATER_VERSIONS = {"vllm.v1.worker.gpu_worker.HAS_TRITON"}  # added, and read by nobody here


def source_parameters(target: str) -> list[str]:
    """Parameters of a function or property as vLLM's source has them, whatever was patched."""
    *_, name = target.split(".")
    owner = resolve(target.rsplit(".", 1)[0])
    if inspect.ismodule(owner):
        return parameters(getattr(owner, name))
    owner = owner if inspect.isclass(owner) else type(owner)
    tree = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
    (function,) = [
        item
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name == name
    ]
    arguments = function.args
    return [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def test_every_patched_name_is_under_contract():
    targets = [patch.target for patch in contract.PATCHES]
    assert sorted(targets) == sorted([*SIGNATURES, *OBJECTS, *FROM_LATER_VERSIONS])
    assert all(patch.action and patch.why for patch in contract.PATCHES)


@pytest.mark.parametrize("target", SIGNATURES)
def test_the_signature_of_a_patched_function(target):
    found = source_parameters(target)
    if target == "vllm.ModelRegistry.register_model":
        found = found[1:]  # self
    assert found == SIGNATURES[target]


@pytest.mark.parametrize("target", OBJECTS)
def test_the_type_of_a_patched_object(target):
    assert isinstance(resolve(target), OBJECTS[target])


@pytest.mark.parametrize("target", FROM_LATER_VERSIONS)
def test_a_name_of_later_versions_is_not_in_this_one(target):
    module, _, name = target.rpartition(".")
    assert name not in inspect.getsource(resolve(module))


def test_the_registry_has_our_architecture_to_replace():
    source = inspect.getsource(resolve("vllm.model_executor.models.config"))
    assert f'"{install.BUILTIN_ARCHITECTURE}":' in source, "the built-in config hook is gone"
    hook = resolve("vllm.model_executor.models.config.VerifyAndUpdateConfig")
    assert parameters(hook.verify_and_update_config) == ["vllm_config"]


def imports_of_ours() -> set[tuple[str, str]]:
    """Every (module, name) that our code imports from vLLM, also by a module's name in a string."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(r"vllm(\.|$)", node.module or ""):
                found |= {(str(node.module), alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                names = (alias.name for alias in node.names)
                found |= {(name, "") for name in names if re.match(r"vllm(\.|$)", name)}
            elif is_module_name(node) and node.value not in NO_MODULES:
                found.add((node.value, ""))
    return found


# Strings that only look like modules of vLLM: a logger, the group of its plugins.
NO_MODULES = {LOGGER, neighbours.PLUGIN_GROUP, *(patch.target for patch in contract.PATCHES)}


def is_module_name(node: ast.AST) -> bool:
    """A string that could be given to import_module; names of kernels go to register_kernels."""
    text = str(getattr(node, "value", "")) if isinstance(node, ast.Constant) else ""
    return bool(re.fullmatch(r"vllm(\.\w+)+", text)) and not text.endswith("kernel")


# Needs torchvision, without which nothing of it is imported.
UNIMPORTABLE = {f"vllm.model_executor.models.{name}" for name in ("diffusion_gemma", "gemma4_mm")}


@pytest.mark.parametrize(("module", "name"), sorted(imports_of_ours()))
def test_what_we_import_from_vllm_exists(module, name):
    if module in UNIMPORTABLE:
        assert importlib.util.find_spec(module) is not None
    else:
        resolve(f"{module}.{name}" if name else module)


def names_of_vllm(tree: ast.AST) -> dict[str, str]:
    """What a module imports from vLLM: the dotted name of each of its own names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import) and node.names[0].name.split(".")[0] == "vllm":
            for each in node.names:
                first = each.name.split(".")[0]
                found[each.asname or first] = each.name if each.asname else first
    return found


def assigned(tree: ast.AST) -> Iterator[ast.expr]:
    """What a module assigns to; also by setattr, where a loop goes through (owner, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.target
        elif isinstance(node, ast.For) and any(map(is_setattr, ast.walk(node))):
            for item in getattr(node.iter, "elts", ()):
                pair = getattr(item, "elts", [item])
                yield ast.Attribute(pair[0], getattr(pair[-1], "value", "?"))
        elif is_setattr(node):
            yield ast.Attribute(node.args[0], getattr(node.args[1], "value", "?"))


def is_setattr(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) == "setattr"


def replaced_attributes(path: Path) -> list[str]:
    """Attributes, by dotted name, that a module of ours assigns to names imported from vLLM."""
    tree = ast.parse(path.read_text())
    theirs = names_of_vllm(tree)
    found = []
    for target in assigned(tree):
        names, owner = [], target
        while isinstance(owner, ast.Attribute | ast.Subscript):
            # What is in brackets is an entry, and no name of vLLM.
            names = [owner.attr, *names] if isinstance(owner, ast.Attribute) else []
            owner = owner.value
        if owner is not target and getattr(owner, "id", None) in theirs:
            found.append(".".join([theirs[owner.id], *names]))
    return found


def test_only_patches_replace_attributes_of_vllm():
    places = {path.parent for path in SOURCES if replaced_attributes(path)}
    assert places == {ROOT / "dllm/patches"}


@pytest.mark.parametrize(
    "line",
    [
        "Scheduler.schedule = 1",
        "setattr(Scheduler, 'schedule', 1)",
        "for owner, name in ((Scheduler, 'schedule'),): setattr(owner, name, 1)",
        "Scheduler.schedule[0] = 1",
    ],
)
def test_a_planted_replacement_is_found(line, tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(f"from vllm.v1.core.sched.scheduler import Scheduler\n{line}\n")
    assert set(replaced_attributes(planted)) == {"vllm.v1.core.sched.scheduler.Scheduler.schedule"}


def canonical(target: str) -> str:
    """A dotted name with its owner named as it names itself, wherever it was imported from."""
    owner, _, name = target.rpartition(".")
    found = resolve(owner)
    if inspect.isclass(found):
        owner = f"{found.__module__}.{found.__qualname__}"
    return f"{owner}.{name}"


def test_what_our_source_replaces_and_registers_is_under_contract():
    listed = {canonical(patch.target) for patch in contract.PATCHES}
    found = {canonical(name) for path in SOURCES for name in replaced_attributes(path)}
    imported = {name for tree in trees() for name in names_of_vllm(tree).values()}
    found |= {canonical(name) for name in imported if name.split(".")[-1].startswith("register_")}
    assert len(found) > 40 and sorted(found - listed) == []


# --- what we override -----------------------------------------------------------------------------

OVERRIDING = (
    ("dllm.engine.scheduler.CanvasScheduler", "vllm.v1.core.sched.scheduler.Scheduler"),
    (
        "dllm.engine.async_scheduler.CanvasAsyncScheduler",
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    ),
    (
        "dllm.engine.model_state.DiffusionModelState",
        "vllm.v1.worker.gpu.model_states.interface.ModelState",
    ),
    ("dllm.patches.cpu_worker.CanvasCPUWorker", "vllm.v1.worker.cpu_worker.CPUWorker"),
    (
        "dllm.drafter.speculator.Drafter",
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator.DFlashSpeculator",
    ),
    (
        "dllm.drafter.verification.DrafterInvariantSampler",
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler",
    ),
    ("dllm.drafter.scheduler.DraftingScheduler", "vllm.v1.core.sched.scheduler.Scheduler"),
    ("dllm.remote.scheduler.RemoteScheduler", "vllm.v1.core.sched.scheduler.Scheduler"),
    (
        "dllm.remote.speculator.RemoteDrafts",
        "vllm.v1.worker.gpu.spec_decode.speculator.BaseSpeculator",
    ),
    (
        "dllm.attention.cpu_backend.AnchoredMetadataBuilder",
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder",
    ),
    (
        "dllm.attention.cpu_backend.AnchoredAttentionImpl",
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",
    ),
    (
        "dllm.attention.cpu_backend.AnchoredCPUBackend",
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
    ),
    (
        "dllm.quant.cpu_config.EmulatingConfig",
        f"{COMPRESSED}.compressed_tensors.CompressedTensorsConfig",
    ),
    (
        "dllm.quant.cpu_config.EmulatedNvfp4Linear",
        f"{COMPRESSED}.schemes.CompressedTensorsW4A4Fp4",
    ),
    ("dllm.quant.cpu_config.Int8Linear", f"{COMPRESSED}.schemes.CompressedTensorsW8A8Int8"),
    (
        "dllm.quant.cpu_experts.EmulatedExperts",
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase",
    ),
)


def overrides() -> list[tuple[str, str, str]]:
    """(class, base, method) for every public method that replaces one of vLLM's."""
    return [
        (ours, base, name)
        for ours, base in OVERRIDING
        for name, value in vars(resolve(ours)).items()
        if not name.startswith("__")
        and callable(getattr(value, "__func__", value))
        and hasattr(resolve(base), name)
    ]


EXPECTED_OVERRIDES = {
    "CanvasScheduler": {"schedule", "update_draft_token_ids", "_update_request_with_output"},
    "CanvasAsyncScheduler": {"_update_after_schedule", "_update_request_with_output"},
    "DiffusionModelState": {
        "get_supported_generation_tasks",
        "custom_sampler",
        "add_request",
        "apply_staged_writes",
        "prepare_inputs_embeds",
        "prepare_inputs",
        "prepare_dummy_inputs",
        "prepare_attn",
    },
    "Drafter": {
        "propose",
        "load_draft_model",
        "_generate_draft",
        "sample_draft",
        "_maybe_predict_acceptance",
    },
    "DrafterInvariantSampler": {"_verify"},
    "DraftingScheduler": {"schedule", "update_draft_token_ids", "make_stats"},
    "RemoteScheduler": {"schedule", "update_from_output", "update_draft_token_ids"},
    "RemoteDrafts": {"init_cudagraph_manager", "capture", "propose"},
    "AnchoredMetadataBuilder": {"build"},
    "AnchoredAttentionImpl": {"forward"},
    "AnchoredCPUBackend": {"get_impl_cls", "get_builder_cls"},
    "EmulatingConfig": {"from_config", "get_quant_method", "_get_scheme_from_parts"},
    "EmulatedNvfp4Linear": {"create_weights", "process_weights_after_loading", "apply_weights"},
    "Int8Linear": {"process_weights_after_loading"},
    "EmulatedExperts": {"process_weights_after_loading", "apply", "get_fused_moe_quant_config"},
}


def test_what_we_override_still_exists_in_the_base():
    """A hook that vLLM renames would silently never be called."""
    found: dict[str, set[str]] = {}
    for ours, _, name in overrides():
        found.setdefault(ours.rsplit(".", 1)[1], set()).add(name)
    for cls, names in EXPECTED_OVERRIDES.items():
        assert names <= found.get(cls, set()), cls


@pytest.mark.parametrize(("ours", "base", "method"), overrides())
def test_an_override_has_the_parameters_of_its_base(ours, base, method):
    def described(cls: str) -> list[tuple[str, Any, Any]]:
        signature = inspect.signature(getattr(resolve(cls), method))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    mine, theirs = described(ours), described(base)
    kinds = [kind for _, kind, _ in mine]
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # those not named are passed on as they come
        named = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        assert kinds[-1] == inspect.Parameter.VAR_KEYWORD
        defaults = {name: default for name, _, default in theirs}
        assert all(defaults[name] == default for name, _, default in mine[named + 1 : -1])
        mine, theirs = mine[:named], theirs[:named]
    elif kinds and kinds[-1] == inspect.Parameter.VAR_KEYWORD and theirs[-1][1] != kinds[-1]:
        mine, theirs = mine[:-1], theirs[: len(mine) - 1]  # a later version may have more
    assert mine == theirs


def test_the_constructors_we_call():
    impl = resolve("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl")
    wanted = parameters(impl.__init__)[1:]
    # use_anchored_window rebuilds a layer's impl: a new parameter would be dropped on the way.
    passed = keywords_of_calls("AnchoredAttentionImpl", "attention/cpu_backend.py")
    assert set(wanted) - passed == {"sinks"}  # asserted to be None there
    builder = resolve("vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder")
    assert parameters(builder.__init__)[1:] == [
        "kv_cache_spec",
        "layer_names",
        "vllm_config",
        "device",
    ]
    state = resolve("vllm.v1.worker.gpu.model_states.interface.ModelState")
    ours = resolve("dllm.engine.model_state.DiffusionModelState")
    assert parameters(state.__init__) == parameters(ours.__init__)
    assert resolve("vllm.v1.worker.cpu_worker.CPUWorker").__init__ is not object.__init__
    assert parameters(resolve("vllm.v1.worker.cpu_worker.CPUWorker").__init__)[1] == "vllm_config"


# --- what we call ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ("vllm._custom_ops.cpu_attn_get_scheduler_metadata", "attention/cpu_backend.py"),
        ("vllm._custom_ops.cpu_attention_with_kv_cache", "attention/cpu_backend.py"),
    ],
)
def test_the_cpu_kernel_takes_what_we_pass_and_nothing_else(target, file):
    """A new parameter has a meaning: somebody has to decide what it is for our rows."""
    function = resolve(target)
    assert keywords_of_calls(function.__name__, file) == set(parameters(function))


def test_attention_metadata_takes_what_we_pass():
    """Some keywords are in dictionaries: every string key of prepare_attn's helpers counts."""
    accepted = set(parameters(resolve("vllm.v1.worker.gpu.attn_utils.build_attn_metadata")))
    passed = keywords_of_calls("build_attn_metadata", "dllm/engine/model_state.py")
    (tree,) = trees("dllm/engine/model_state.py")
    for function in ast.walk(tree):
        if getattr(function, "name", None) in ("_rows", "_virtual_sequences"):
            returned = [node for node in ast.walk(function) if isinstance(node, ast.Dict)]
            passed |= {key.value for node in returned for key in node.keys}
    assert {"causal", "seq_lens", "block_tables", "attn_groups"} <= passed
    assert passed <= accepted


def test_what_a_sampler_returns():
    output = resolve("vllm.v1.worker.gpu.sample.output.SamplerOutput")
    fields = {field.name: field for field in dataclasses.fields(output)}
    passed = keywords_of_calls("SamplerOutput", "dllm/engine/sampler.py")
    required = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
    assert required <= passed <= set(fields)


def test_logprobs_and_warm_up_fill_what_vllm_declares():
    logprobs = resolve("vllm.v1.outputs.LogprobsTensors")
    assert keywords_of_calls("LogprobsTensors", "dllm/engine/logprobs.py") <= set(logprobs._fields)
    request = resolve("vllm.v1.core.sched.output.NewRequestData")
    assert keywords_of_calls("NewRequestData", "dllm/engine/warm_up.py") <= set(parameters(request))
    for name in ("SchedulerOutput", "CachedRequestData"):
        cls = resolve(f"vllm.v1.core.sched.output.{name}")
        fields = {field.name for field in dataclasses.fields(cls)}
        variable = {"SchedulerOutput": "output", "CachedRequestData": "cached"}[name]
        assert attributes_read(variable, "dllm/engine/warm_up.py") <= fields | {"make_empty"}


def test_weight_loading():
    loader = resolve("vllm.model_executor.models.utils.AutoWeightsLoader")
    assert parameters(loader.__init__)[:2] == ["self", "module"]
    assert parameters(loader.load_weights) == ["self", "weights", "mapper"]
    mapper = resolve("vllm.model_executor.models.utils.WeightsMapper")
    fields = {field.name for field in dataclasses.fields(mapper)}
    assert {"orig_to_new_prefix", "orig_to_new_stacked"} <= fields
    # A prefix that maps to None drops a weight: the vision tower's.
    mapped = mapper(orig_to_new_prefix={"tower.": None, "model.decoder.": "model."})
    assert [mapped.map_name(name) for name in ("tower.x", "model.decoder.y", "z")] == [
        None,
        "model.y",
        "z",
    ]


# --- what we read ---------------------------------------------------------------------------------


def test_the_fields_of_a_batch():
    batch = resolve("vllm.v1.worker.gpu.input_batch.InputBatch")
    names = ("model_state", "sampler", "canvas_rows", "edits", "logprobs")
    read = attributes_read("input_batch", *(f"dllm/engine/{name}.py" for name in names))
    read |= attributes_read("batch", "dllm/engine/pending.py")
    assert {"cu_num_logits_np", "logits_indices", "num_draft_tokens_per_req"} <= read
    assert read <= {field.name for field in dataclasses.fields(batch)}


def test_the_fields_of_common_attention_metadata():
    metadata = resolve("vllm.v1.attention.backend.CommonAttentionMetadata")
    read = attributes_read("common", "attention/cpu_backend.py", "attention/backend.py")
    assert {"causal", "block_table_tensor"} <= read
    assert read <= {field.name for field in dataclasses.fields(metadata)}


def test_the_state_of_requests():
    state = resolve("vllm.v1.worker.gpu.states.RequestState")(
        max_num_reqs=2,
        max_model_len=8,
        max_num_batched_tokens=8,
        num_speculative_steps=4,
        vocab_size=16,
        device=torch.device("cpu"),
    )
    read = attributes_read("req_states", "dllm/engine/model_state.py", "dllm/engine/sampler.py")
    assert read >= {"draft_tokens", "all_token_ids"}
    assert all(hasattr(state, name) for name in read)
    # Canvases ride in draft_tokens; emitted ids come from all_token_ids.
    assert state.draft_tokens.shape == (2, 4) and state.draft_tokens.dtype == torch.int64
    assert state.all_token_ids.gpu.shape == (2, 8)


def test_the_state_of_filters():
    states = resolve("vllm.v1.worker.gpu.sample.states.SamplingStates")(2, 16)
    assert attributes_read("sampling_states", "dllm/engine/sampler.py") == {
        "add_request",
        "apply_staged_writes",
    }
    assert parameters(states.add_request) == ["req_idx", "sampling_params"]
    # What `_filters` takes for "off".
    for name, off in (("top_k", 16), ("top_p", 1.0), ("min_p", 0.0)):
        filters = getattr(states, name)
        assert filters.np.tolist() == filters.gpu.tolist() == [off, off]


def test_the_states_of_the_sampler():
    sampler = resolve("vllm.v1.worker.gpu.sample.sampler.Sampler")
    assert attributes_read("sampler", "dllm/engine/sampler.py", "dllm/engine/edits.py") == {
        "req_states",
        "sampling_states",
        "penalties_state",
        "logits_processors",
    }
    source = inspect.getsource(sampler.__init__)
    assert attributes_assigned(sampler.__init__) >= {"req_states", "sampling_states"}
    assert attributes_assigned(sampler.__init__) >= {"penalties_state", "logprob_token_ids_state"}
    processors = """self.logits_processors: list[LogitsProcessor] = [
            logit_bias_state,
            self.penalties_state,
            bad_words_state,
            *custom_logits_processors,
        ]"""
    assert processors in source, "LogitEdits unpacks them in this order"
    assert parameters(sampler.get_logprobs_dims)[:2] == ["self", "idx_mapping_np"]


def test_how_logit_edits_see_a_batch():
    context = resolve("vllm.v1.worker.gpu.sample.logits_processor.interface.LogitsContext")
    assert {field.name for field in dataclasses.fields(context)} == {
        "expanded_idx_mapping",
        "idx_mapping",
        "idx_mapping_np",
        "expanded_local_pos",
        "input_ids",
        "pos",
        "seq_lens_upper_bound_np",
    }
    for name in ("logit_bias.LogitBias", "penalties.Penalties", "bad_words.BadWords"):
        state = resolve(f"vllm.v1.worker.gpu.sample.{name}State")
        assert parameters(state.add_request) == ["self", "req_idx", "sampling_params"]
        assert parameters(state.apply) == ["self", "logits", "ctx"]
        assert parameters(state.apply_staged_writes) == ["self"]


def test_the_function_that_reports_logprobs():
    function = resolve("vllm.v1.worker.gpu.sample.logprob.compute_topk_scores")
    assert parameters(function) == [
        "logits",
        "num_logprobs",
        "sampled_token_ids",
        "cu_num_logits",
        "logprob_token_ids_state",
        "expanded_idx_mapping",
        "max_per_req_token_ids",
        "logits_mode",
    ]


def test_prompt_logprobs_on_their_way():
    """The worker computes them, and the scheduler wants them together with the first tokens."""
    output = resolve("vllm.v1.outputs.ModelRunnerOutput")
    assert attributes_read("output", "dllm/engine/prompt_logprobs.py") <= {
        field.name for field in dataclasses.fields(output)
    }
    scheduler = resolve("vllm.v1.core.sched.scheduler.Scheduler")
    assert "assert not prompt_logprobs_tensors" in inspect.getsource(scheduler.update_from_output)


def test_how_stop_tokens_and_bad_words_become_ids():
    processor = resolve("vllm.v1.engine.input_processor.InputProcessor")
    source = inspect.getsource(processor)
    assert (
        """sampling_params.update_from_generation_config(
                self.generation_config_fields,
                self.renderer.get_eos_token_id(),
            )
            if self.tokenizer is not None:
                sampling_params.update_from_tokenizer(self.tokenizer)"""
        in source
    )


def test_the_runner_calls_a_sampler_as_ours_is_written():
    runner = inspect.getsource(resolve("vllm.v1.worker.gpu.model_runner"))
    assert "custom_sampler(" in runner
    for method in attributes_read("sampler", "dllm/patches/cpu_worker.py"):
        assert hasattr(resolve("dllm.engine.sampler.DiffusionSampler"), method)
    # Every attribute that the runner reads of its sampler, ours has too.
    read = {
        node.attr
        for node in ast.walk(ast.parse(runner))
        if isinstance(node, ast.Attribute) and getattr(node.value, "attr", None) == "sampler"
    }
    assert "apply_staged_writes" in read
    ours = resolve("dllm.engine.sampler.DiffusionSampler")
    own = attributes_assigned(ours.__init__)
    missing = {name for name in read if not hasattr(ours, name) and name not in own}
    # Read only when tensor-parallel ranks share out the sampling of a batch.
    assert missing == {"compute_nans", "get_logprobs_dims"}


def attributes_assigned(method: Callable[..., Any]) -> set[str]:
    """Names that a method assigns on self."""
    return set(re.findall(r"self\.(\w+) =", inspect.getsource(method)))


def test_the_scheduler_attributes_we_read():
    scheduler = resolve("vllm.v1.core.sched.scheduler.Scheduler")
    source = "".join(inspect.getsource(cls) for cls in scheduler.__mro__[:-1])
    ours = resolve("dllm.engine.scheduler.CanvasScheduler")
    own = set(vars(ours)) | attributes_assigned(ours.__init__)
    for name in attributes_read("self", "dllm/engine/scheduler.py") - own:
        assert re.search(rf"self\.{name}( =|:)|def {name}\(", source), name
    request = inspect.getsource(resolve("vllm.v1.request.Request"))
    for file in ("dllm/engine/scheduler.py", "dllm/engine/async_scheduler.py"):
        for name in attributes_read("request", file):
            assert f"self.{name}" in request or f"def {name}(" in request, name


def test_the_layers_of_the_backbone(checkpoint):
    """On a real model: what CanvasBackbone reads of Gemma4Model, and how it calls a layer."""
    layer_cls = resolve("vllm.model_executor.models.gemma4.Gemma4DecoderLayer")
    assert parameters(layer_cls.forward) == [
        "self",
        "positions",
        "hidden_states",
        "residual",
        "per_layer_input",
        "kwargs",
    ]
    model = get_engine(checkpoint(), max_num_batched_tokens=256).runner.model
    backbone = model.model
    for name in attributes_read("model", "dllm/models/gemma/backbone.py") | {
        "normalizer",
        "embed_tokens",
    }:
        assert hasattr(backbone, name), name
    for name in ("layers", "norm", "hf_to_vllm_mapper"):
        assert hasattr(backbone, name), name
    for layer in backbone.layers:
        # Ours multiplies per row; the layer's own factor has to be 1.
        assert layer.layer_scalar.tolist() == [1.0]
        assert hasattr(layer.self_attn, "is_sliding") and hasattr(layer.self_attn, "attn")
    shard = backbone.embed_tokens.shard_indices
    assert (shard.org_vocab_start_index, shard.org_vocab_end_index) == (0, 512)


# --- installing -----------------------------------------------------------------------------------


def test_installing_again_changes_nothing():
    def state() -> tuple[object, ...]:
        vllm_config = resolve("vllm.config.VllmConfig")
        return (
            vllm_config.use_v2_model_runner,
            vllm_config._validate_v2_model_runner,
            resolve("vllm.sampling_params.SamplingParams")._validate_diffusion,
            resolve("vllm.v1.engine.input_processor.InputProcessor")._validate_params,
            resolve("vllm.multimodal.registry.MultiModalRegistry").create_processor,
            resolve("vllm.model_executor.models.config.MODELS_CONFIG_MAP")[
                install.BUILTIN_ARCHITECTURE
            ],
        )

    install.install(serve_with_dllm=True)
    first = state()
    assert first[3].__module__ == first[4].__module__ == "dllm.patches.admission"
    install.install(serve_with_dllm=True)
    install.install(serve_with_dllm=False)
    assert state() == first


def test_registering_imports_no_model_no_runner_and_no_device():
    script = """
import sys, torch, dllm
dllm.register()
from vllm.model_executor.models.registry import ModelRegistry
runner = ("vllm.v1.worker.gpu", "vllm.v1.worker.cpu", "vllm.v1.attention.backends.cpu_attn")
layers = ("vllm.model_executor.layers.attention.", "vllm.model_executor.models.gemma")
ours = ("dllm.models.gemma.backbone", "dllm.engine", "dllm.cpu", "dllm.attention")
assert "ARCH" in ModelRegistry.models
heavy = {name for name in sys.modules if name.startswith(runner + layers + ours)}
light = {"dllm.engine", "dllm.engine.frames"}  # which the API server reads
print(sorted(heavy - light), torch.cuda.is_initialized())
""".replace("ARCH", install.BUILTIN_ARCHITECTURE)
    environment = {"DLLM_DISABLE": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    result = run_python("-c", script, environment=environment)
    assert result.stdout.splitlines()[-1] == "[] False"


# --- images ---------------------------------------------------------------------------------------

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": PIXEL}},
        ],
    }
]


def parse_chat(model: Path, messages: list[dict[str, Any]]) -> Any:
    """What the API server does first with a chat request."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers.chat_utils import parse_chat_messages_async

    config = EngineArgs(model=str(model), enforce_eager=True).create_model_config()
    return asyncio.run(parse_chat_messages_async(messages, config, "openai"))


def test_an_image_gets_a_400_that_says_why(checkpoint, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        VLLMValidationError,
        match=r"text-only: images need torchvision, which is not installed here\. Send text",
    ):
        parse_chat(checkpoint(), MESSAGES)


def test_an_image_gets_a_400_also_where_torchvision_is(checkpoint, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(VLLMValidationError, match=r"served without its vision tower\. Send text"):
        parse_chat(checkpoint(), MESSAGES)


def test_text_parts_pass(checkpoint):
    conversation, media, _ = parse_chat(
        checkpoint(), [{"role": "user", "content": MESSAGES[0]["content"][:1]}]
    )
    assert conversation[0]["content"] == [{"type": "text", "text": "What is this?"}]
    assert media is None


def test_other_text_only_models_get_vllms_own_answer():
    """Scoped to our architecture."""
    config = type("Config", (), dict(architecture="Qwen3ForCausalLM", is_multimodal_model=False))
    config.served_model_name = "qwen"
    registry = resolve("vllm.multimodal.registry.MultiModalRegistry")()
    with pytest.raises(ValueError, match="qwen is not a multimodal model"):
        registry.create_processor(config)
