"""Contracts with vLLM: when one of these fails, vLLM has moved and ``dllm/patches`` must follow.

What our code replaces, overrides, imports and calls is taken from our code itself and compared with
what vLLM's source has (``support.vllm_source``). What an engine on a CPU runs in any test is not
repeated here.
"""

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dllm import LOGGER
from dllm.api.decisions import route
from dllm.patches import contract, install, neighbours
from dllm.patches.neighbours import vllm_version
from dllm.settings import vllm_names
from tests.support.engine_harness import Engine  # noqa: F401  sets vLLM's environment first
from tests.support.process import run_python
from tests.support.signatures import mismatch
from tests.support.vllm_source import (
    ROOT,
    SOURCES,
    function_of_vllm,
    installed,
    names_of_vllm,
    nodes_of,
    overrides,
    replaced,
    subclasses_of_vllm,
)

# What vLLM's plugin loader does; tests that start no engine need it, too.
install.install()


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


def attributes_read(of: str, *files: str) -> set[str]:
    """Attributes that our code reads of a variable, or of an attribute, called ``of``."""
    return {
        node.attr
        for file in files
        for node in nodes_of(ROOT / file)
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "id", getattr(node.value, "attr", None)) == of
    }


# --- what we replace ------------------------------------------------------------------------------


def canonical(target: str) -> str:
    """A dotted name with its owner named as it names itself, wherever it was imported from."""
    owner, _, name = installed(target).rpartition(".")
    found = resolve(owner)
    if inspect.isclass(found):
        owner = f"{found.__module__}.{found.__qualname__}"
    return f"{owner}.{name}"


def registered(path: Path) -> set[str]:
    """What a file calls of vLLM to register something."""
    theirs = names_of_vllm(path)
    found = {name for name in theirs.values() if name.split(".")[-1].startswith("register_")}
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and node.attr.startswith("register_"):
            owner = getattr(node.value, "id", None)
            found |= {f"{theirs[owner]}.{node.attr}"} if owner in theirs else set()
    return found


def test_the_contract_lists_what_our_source_replaces_and_registers():
    found = {each.name for path in SOURCES for each in replaced(path)}
    found |= {name for path in SOURCES for name in registered(path)}
    assert len(found) > 30
    assert {canonical(name) for name in found} == {canonical(name) for name in contract.PATCHES}
    assert all(contract.PATCHES.values())


def test_the_contract_lists_the_routes_that_our_source_takes_out():
    """A removal fails nowhere if vLLM renames the route: its route would answer beside ours."""
    taking = {path for path in SOURCES for node in nodes_of(path) if is_removal(node)}
    assert taking == {Path(route.__file__)}
    assert [path for path, _ in contract.ROUTES.values()] == [route.PATH]


def is_removal(node: ast.AST) -> bool:
    """An assignment to an app's list of routes."""
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return any(re.search(r"\broutes\[", ast.unparse(target)) for target in targets)


@pytest.mark.parametrize("target", contract.ROUTES)
def test_vllm_has_the_routes_that_are_taken_out(target):
    if vllm_version().startswith("0.32."):
        pytest.skip("vLLM 0.32 has no such route")
    served = resolve(f"{target.rpartition('.')[0]}.router").routes
    paths = [one.path for one in served if one.endpoint is resolve(target)]
    assert paths == [contract.ROUTES[target][0]]


def test_only_patches_replace_attributes_of_vllm():
    assert {path.parent for path in SOURCES if replaced(path)} == {ROOT / "dllm/patches"}


def test_what_we_put_in_the_place_of_a_function_takes_its_calls():
    wrong, seen = {}, 0
    for each in (each for path in SOURCES for each in replaced(path)):
        theirs = function_of_vllm(each.name)
        if theirs is None:
            assert each.name in map(installed, NO_FUNCTIONS), f"{each.name} is gone"
            continue
        assert each.function is not None, each.name
        seen += 1
        if reason := mismatch(each.function, theirs):
            wrong[each.name] = reason
    assert seen > 10 and not wrong


NO_FUNCTIONS = {
    "vllm.config.VllmConfig": type,
    "vllm.v1.engine.async_llm.AsyncLLM": type,
    "vllm.v1.engine.core.EngineCore": type,
    "vllm.v1.engine.core_client.AsyncMPClient": type,
    "vllm.v1.engine.input_processor.InputProcessor": type,
    "vllm.v1.engine.llm_engine.LLMEngine": type,
    "vllm.ModelRegistry.models": dict,
    "vllm.model_executor.models.config.MODELS_CONFIG_MAP": dict,
    "vllm.transformers_utils.config._CONFIG_REGISTRY": dict,
    "vllm.entrypoints.openai.decisions.strategies.READ_STRATEGIES": dict,
    "vllm.entrypoints.openai.decisions.question_types.QUESTION_TYPES": dict,
    "vllm.model_executor.models.gemma4_mm": ModuleType,
    "vllm.v1.worker.cpu.model_runner.CPUModelRunner": type,
    "vllm.v1.worker.gpu_worker.HAS_TRITON": bool,
    "vllm.triton_utils.triton.next_power_of_2": object,
}


NOT_IN_0_32 = {"vllm.v1.worker.gpu_worker.HAS_TRITON"}


@pytest.mark.parametrize("target", NO_FUNCTIONS)
def test_the_type_of_a_patched_object(target):
    if target in NOT_IN_0_32 and vllm_version().startswith("0.32."):
        pytest.skip("vLLM 0.32 has no such name")
    if target in UNIMPORTABLE:
        assert importlib.util.find_spec(target) is not None
    else:
        assert isinstance(resolve(installed(target)), NO_FUNCTIONS[target])


@pytest.mark.parametrize(
    "line",
    [
        "Scheduler.schedule = ours",
        "setattr(Scheduler, 'schedule', made())",
        "for owner, name in ((Scheduler, 'schedule'),): setattr(owner, name, ours)",
        "@replaces(Scheduler)\ndef schedule(theirs, self): pass",
        "Scheduler.schedule[0] = ours",
        "type.__setattr__(Scheduler, 'schedule', ours)",
    ],
)
def test_a_planted_replacement_is_found(line, tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(
        "from vllm.v1.core.sched.scheduler import Scheduler\n"
        "def ours(self): pass\n"
        "def made():\n    def schedule(self): pass\n    return schedule\n"
        f"{line}\n"
    )
    (found,) = set(replaced(planted))
    assert found.name == "vllm.v1.core.sched.scheduler.Scheduler.schedule"
    theirs = function_of_vllm(found.name)
    assert "throttle_prefills is not taken" in mismatch(found.function, theirs)


@pytest.mark.parametrize(
    "line",
    [
        "Scheduler.schedule, other = ours, None",
        "for Scheduler.schedule in ours: pass",
        "del Scheduler.schedule",
        "delattr(Scheduler, 'schedule')",
    ],
)
def test_a_planted_place_is_found(line, tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(f"from vllm.v1.core.sched.scheduler import Scheduler\n{line}\n")
    (found,) = replaced(planted)
    assert found.name == "vllm.v1.core.sched.scheduler.Scheduler.schedule"


@pytest.mark.parametrize("line", ["update(Ours=1)", "setdefault('Ours', 1)", "pop('Theirs')"])
def test_a_planted_change_of_a_table_is_found(line, tmp_path):
    planted = tmp_path / "planted.py"
    table = "vllm.model_executor.models.config.MODELS_CONFIG_MAP"
    planted.write_text(f"from {table.rpartition('.')[0]} import MODELS_CONFIG_MAP\n")
    with planted.open("a") as file:
        file.write(f"MODELS_CONFIG_MAP.{line}\n")
    assert [each.name for each in replaced(planted)] == [table]


# --- what we import -------------------------------------------------------------------------------


def imports_of_ours() -> set[tuple[str, str]]:
    """Every (module, name) that our code imports from vLLM, also by a module's name in a string."""
    found = {(vllm_names.place_of(name), "") for name in vllm_names.PLACES}
    for path in (path for path in SOURCES if path.stem != "vllm_names"):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and re.match(r"vllm(\.|$)", node.module or ""):
                found |= {(str(node.module), alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                names = (alias.name for alias in node.names)
                found |= {(name, "") for name in names if re.match(r"vllm(\.|$)", name)}
            elif is_module_name(node) and node.value not in NO_MODULES:
                found.add((node.value, ""))
    return found


# Strings that only look like modules of vLLM: a logger, the group of its plugins.
NO_MODULES = {LOGGER, neighbours.PLUGIN_GROUP, *contract.PATCHES, *contract.OBJECTS}
NO_MODULES |= contract.ROUTES.keys()


def is_module_name(node: ast.AST) -> bool:
    """A string that could be given to import_module; names of kernels go to register_kernels."""
    text = str(getattr(node, "value", "")) if isinstance(node, ast.Constant) else ""
    return bool(re.fullmatch(r"vllm(\.\w+)+", text)) and not text.endswith("kernel")


# Needs torchvision, without which nothing of it is imported.
UNIMPORTABLE = {f"vllm.model_executor.models.{name}" for name in ("diffusion_gemma", "gemma4_mm")}
# Exists on a GPU alone; tests/attention/test_attention_choice.py calls the function behind it.
UNIMPORTABLE |= {"vllm.v1.attention.backends.fa_utils.flash_attn_varlen_func"}


@pytest.mark.parametrize(("module", "name"), sorted(imports_of_ours()))
def test_what_we_import_from_vllm_exists(module, name):
    if module in UNIMPORTABLE:
        assert importlib.util.find_spec(module) is not None
    else:
        resolve(f"{module}.{name}" if name else module)


def calls_of_vllm() -> Iterator[tuple[str, ast.Call]]:
    """Every call in our source of a name that it imports from vLLM, or of an attribute of one."""
    for path in SOURCES:
        theirs = names_of_vllm(path)
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                first, _, rest = ast.unparse(node.func).partition(".")
                if first in theirs and re.fullmatch(r"[\w.]*", rest):
                    yield f"{theirs[first]}.{rest}".rstrip("."), node


def test_what_we_call_of_vllm_takes_what_we_pass():
    wrong, seen = {}, 0
    for name, call in calls_of_vllm():
        if any(name.startswith(module) for module in UNIMPORTABLE):
            continue
        function = resolve(name)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # written in C
            continue
        given = [each for each in call.args if not isinstance(each, ast.Starred)]
        named = {each.arg: 0 for each in call.keywords if each.arg}
        is_all = len(given) == len(call.args) and len(named) == len(call.keywords)
        seen += 1
        try:
            (signature.bind if is_all else signature.bind_partial)(*given, **named)
        except TypeError as error:
            wrong[name] = str(error)
    assert seen > 60 and not wrong


# --- what we override -----------------------------------------------------------------------------

# Overrides that only our own code calls, in a way of their own.
CALLED_BY_US = {"CanvasBackbone.forward", "DiffusionGemmaForBlockDiffusion.embed_input_ids"}
# vLLM calls it with the fields that our own processor makes.
CALLED_BY_US |= {"DiffusionGemmaWithImages.embed_multimodal"}


def test_our_subclasses_are_found():
    """Not all: some whose base is far, beside others, or in a module that needs torchvision."""
    names = {cls.node.name for cls in subclasses_of_vllm()}
    assert len(names) > 25
    assert names >= {"CanvasAttentionImpl", "CanvasGPUWorker", "ImageProcessingInfo"}
    assert names >= {"DraftReport", "RemoteScheduler", "EmulatedFp8Experts", "SDARForCausalLM"}
    methods = {str(each) for each in overrides()}
    assert methods >= {"CanvasRunner.execute_model", "ImageProcessingInfo.get_hf_config"}


def test_an_override_takes_the_calls_of_its_base():
    wrong = {}
    for each in overrides():
        reason = mismatch(each.ours.methods[each.name], each.base.methods[each.name])
        if reason and each.name != "__init__":
            wrong[str(each)] = reason
    assert set(wrong) == CALLED_BY_US, wrong


def test_a_planted_override_is_found(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(
        "from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Base\n"
        "class Beside:\n    def finish_requests(self, request_ids, status=None): pass\n"
        "class Ours(Beside, Base):\n    def update_draft_token_ids(self, wrong): pass\n"
    )
    found = {str(each): each for each in overrides([planted])}
    assert set(found) == {"Beside.finish_requests", "Ours.update_draft_token_ids"}
    reasons = [mismatch(e.ours.methods[e.name], e.base.methods[e.name]) for e in found.values()]
    assert "default of" in reasons[0] or "is in the place" in reasons[0]
    assert reasons[1] == "wrong is in the place of draft_token_ids"


def names_we_use() -> set[str]:
    """Attributes that our source reads, but for those of super(), and words in strings."""
    found = set()
    for node in (node for path in SOURCES for node in nodes_of(path)):
        if isinstance(node, ast.Attribute):
            is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            found |= set() if is_super else {node.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value}
    return found


# What vLLM calls or sets although no base of ours has it: vLLM's module that does.
CALLED_BY_VLLM = {
    "do_kv_cache_update": "vllm.model_executor.layers.attention.attention",
    "get_mm_mapping": "vllm.lora.model_manager",
    "get_model_state_cls": "vllm.v1.worker.gpu.model_states",
    "input_quant_key": "vllm.model_executor.layers.fusion.quant_activation",
    "run_busy_loop": "vllm.v1.engine.core",
}
# Overrides with a name that our source uses for something else, too.
ALSO_USED = {
    "Batch.create_batch_chat_completion",
    "CanvasAsyncScheduler._update_request_with_output",
    "CanvasAttentionBackend.get_name",
    "CanvasAttentionImpl.forward",
    "CanvasBackbone.forward",
    "CanvasCPUImpl.forward",
    "CanvasCPUWorker.execute_model",
    "CanvasCPUWorker.reload_weights",
    "CanvasGPUWorker.sample_tokens",
    "CanvasGPUWorker.sleep",
    "CanvasInputs._validate_params",
    "CanvasLLM.add_request",
    "CanvasReads._image_parts",
    "CanvasReads.num_requests",
    "CanvasReads.read",
    "CanvasRunner.execute_model",
    "CanvasRunner.sample",
    "CanvasRunner.sample_tokens",
    "CanvasScheduler._update_request_with_output",
    "CanvasScheduler.schedule",
    "Chat.create_chat_completion",
    "Completion.create_completion",
    "CountingLoggers.record",
    "DFlashDrafter.load_weights",
    "DiffusionGemmaForBlockDiffusion.embed_input_ids",
    "DiffusionGemmaWithImages.embed_multimodal",
    "DiffusionModelState.add_request",
    "DiffusionModelState.apply_staged_writes",
    "DiffusionModelState.prepare_attn",
    "DiffusionModelState.remove_request",
    "DrafterNetwork._build_fused_kv_buffers",
    "DrafterNetwork.load_weights",
    "DrafterNetwork.precompute_and_store_context_kv",
    "DraftingRunner.execute_model",
    "DraftingRunner.sample_tokens",
    "EmittedText.reset",
    "EmulatedExperts.apply",
    "EmulatedExperts.process_weights_after_loading",
    "EmulatedNvfp4Linear.process_weights_after_loading",
    "EmulatingConfig.from_config",
    "HeldCalls.adjust_request",
    "HermesCalls.extract_tool_calls",
    "ImageProcessingInfo.get_hf_config",
    "ImageProcessingInfo.get_supported_mm_limits",
    "Int8Linear.process_weights_after_loading",
    "LLaDAModelLM.load_weights",
    "LateAnswer.get_output",
    "Messages.create_chat_completion",
    "NemotronLabsDiffusionForCausalLM.load_weights",
    "OneTokenAtATime.parse",
    "OneTokenAtATime.parse_delta",
    "OurRunners.reload_weights",
    "Ours._check_model",
    "Ours._get_trace_headers",
    "OwnRule._verify",
    "PreparingEngine.add_request",
    "PreparingLLM.generate",
    "RatioSampler._verify",
    "RemoteScheduler.schedule",
    "Responses.create_responses",
    "SelfDrafter._run_model",
    "ServerConfig._get_v2_model_runner_unsupported_features",
    "ServerConfig.use_v2_model_runner",
    "Steered._maybe_predict_acceptance",
    "TargetInputs._validate_params",
    "Tokens.serve_tokens",
    "TracedOutputs.add_request",
    "Translating.create_chat_completion",
    "UnmaskingModel.compute_logits",
    "UnmaskingModel.forward",
    "UnmaskingModel.load_weights",
}


def test_a_hook_that_vllm_renames_is_noticed():
    """A method that replaces nothing, and that nobody of us calls, would never be called."""
    replacing = {(each.ours, each.name) for each in overrides()}
    used, unused, also_used = names_we_use(), set(), set()
    for cls in {one for line in subclasses_of_vllm().values() for one in line if one.is_ours}:
        for name in (name for name in cls.methods if not name.startswith("__")):
            if (cls, name) in replacing:
                also_used |= {f"{cls.node.name}.{name}"} if name in used else set()
            elif name not in used:
                unused.add(name)
    assert unused == set(CALLED_BY_VLLM)
    assert also_used == ALSO_USED, "a name that is used twice has to be listed, and to override"
    for name, module in CALLED_BY_VLLM.items():
        assert re.search(rf"\.{name}(\(|: .*=)", inspect.getsource(resolve(module))), name


# --- what we read, where a test on a CPU would not notice -----------------------------------------


def test_the_fields_of_common_attention_metadata():
    metadata = resolve("vllm.v1.attention.backend.CommonAttentionMetadata")
    read = attributes_read("common", "attention/cpu_backend.py", "attention/backend.py")
    assert {"causal", "block_table_tensor"} <= read
    assert read <= {field.name for field in dataclasses.fields(metadata)}


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


# --- installing -----------------------------------------------------------------------------------


def test_installing_again_changes_nothing():
    def state() -> tuple[object, ...]:
        vllm_config = resolve("vllm.config.VllmConfig")
        return (
            resolve("vllm.multimodal.registry.MultiModalRegistry").create_processor,
            resolve("vllm.v1.engine.input_processor.InputProcessor").__new__,
            vllm_config.__new__,
            resolve("vllm.model_executor.models.config.MODELS_CONFIG_MAP")[
                install.BUILTIN_ARCHITECTURE
            ],
        )

    install.install()
    first = state()
    assert not hasattr(first[0].__wrapped__, "__wrapped__")
    install.install()
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
names = ("frames", "channels", "derived", "metrics")
light = {"dllm.engine"} | {f"dllm.engine.{name}" for name in names}
light |= {"dllm.cpu", "dllm.cpu.instructions"}  # the API server reads those, these /proc/cpuinfo
print(sorted(heavy - light), torch.cuda.is_initialized())
""".replace("ARCH", install.BUILTIN_ARCHITECTURE)
    environment = {"DLLM_DISABLE": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    result = run_python("-c", script, environment=environment)
    assert result.stdout.splitlines()[-1] == "[] False"
