"""Contracts with vLLM about single objects: what of them our source replaces (see test_contract).

Such a replacement fails nowhere if vLLM renames what it replaces: nobody reads what we set.
"""

import ast

import pytest

from dllm.patches.contract import OBJECTS
from tests.support.vllm_source import (
    SOURCES,
    Class,
    behind,
    class_named,
    file_of,
    set_on_objects,
    set_on_self,
    subclasses_of_vllm,
)

# Of objects that are no part of what vLLM runs, although an attribute has the name of one that is,
# or nothing says which name it has ("?").
OF_NOBODY = {
    "answer.?": "fields of a message of the worker",
    "choice.?": "a field of an answer in JSON",
    "layer.?": "weights of a layer, which our method of quantization has converted",
    "output.?": "a new attribute of an answer",
    "rest.?": "a copy of a request's parameters",
    "theirs.__new__": "what `derives` derives, and listed",
    "state.?": "of Starlette's app: which object answers a route",
    "hf_config.dflash_config": "config.json of a drafter",
    "layer.experts": "a new attribute, which our method of quantization reads",
    "layer.mlp.experts": "a model of transformers",
    "layer.params_dtype": "what vLLM's own layers have here, too",
    "made.plan": "our class of a configuration",
    "method.apply": "of a copy of a layer's method, which only that layer has",
    "module.do_not_compile": "of a compiled model; read before it is set, which notices a rename",
    "own.dflash_config": "a copy of a drafter's config.json",
    "own.is_neox_style": "the same",
    "own.max_position_embeddings": "the same",
    "own.num_key_value_heads": "the same",
    "reading.experts": "a model of transformers",
    "self.model_state.loop.replay": "of our denoise loop",
    "session.run": "of a draft worker",
    "values.module_name": "a copy of an adapter's layer",
    "writing.experts": "a model of transformers",
}


def test_the_contract_lists_what_our_source_replaces_of_objects():
    found = {expression for path in SOURCES for expression in set_on_objects(path)}
    listed = {expression for expression, _ in OBJECTS.values()}
    assert found == listed | OF_NOBODY.keys()
    assert not listed & OF_NOBODY.keys() and all(why for _, why in OBJECTS.values())


@pytest.mark.parametrize(
    ("line", "expression"),
    [
        ("runner._dummy_run = made", "runner._dummy_run"),
        ("self.model_runner.sampler = made", "self.model_runner.sampler"),
        ("setattr(runner, 'execute_model', made)", "runner.execute_model"),
        ("a, runner.block_tables = made", "runner.block_tables"),
        ("cls = type(runner)\n    cls.execute_model = made", "cls.execute_model"),
        ("for owner, name in made: setattr(owner, name, made)", "owner.?"),
        ("object.__setattr__(runner, 'execute_model', made)", "runner.execute_model"),
        ("runner.model_state.__class__ = Ours", "runner.model_state.__class__"),
        ("Theirs.__init__(runner.input_buffers, 3)", "runner.input_buffers.__init__"),
    ],
)
def test_a_planted_replacement_is_found(line, expression, tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(
        "def patch(self, runner, made):\n"
        f"    {line}\n"
        "    self.sampler = runner.of_nobody = made\n"  # our own, and of nobody
        "    runner.scheduler_config.max_num_seqs = 3\n"  # data, which is there to be set
    )
    assert set_on_objects(planted) == {expression}


def has_member(name: str) -> bool:
    """Whether vLLM's source has a class with this method or attribute."""
    owner, _, member = name.rpartition(".")
    module, _, cls = owner.rpartition(".")
    found = class_named(cls, file_of(module), module)
    if found is None or member == "__class__":
        return found is not None
    return any(member in members(one) for one in behind(found))


def members(cls: Class) -> set[str]:
    declared = {getattr(node.target, "id", "") for node in cls.node.body if is_field(node)}
    return {*cls.methods, *set_on_self(cls), *declared}


def is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign)


@pytest.mark.parametrize("name", OBJECTS)
def test_vllm_has_what_is_replaced(name):
    assert has_member(name)
    if not name.endswith("__"):
        assert not has_member(f"{name}_renamed")


# What methods of our classes set on self, and those of their bases in vLLM, too.
SET_IN_SUBCLASSES = {
    "CanvasAttentionImpl.head_size",
    "CanvasAttentionImpl.kv_cache_dtype",
    "CanvasAttentionImpl.num_heads",
    "CanvasAttentionImpl.scale",
    "CanvasCPUBuilder.window_size",
    "CanvasCPUImpl.sliding_window",
    "CanvasCore.structured_output_manager",
    "CanvasEngine.output_processor",
    "CanvasLLM.output_processor",
    "CanvasReads.modalities",
    "CanvasReads.tail",
    "CanvasRunner.lora_manager",
    "CanvasRunner.lora_state",
    "CanvasRunner.structured_outputs_worker",
    "CanvasScheduler.need_mamba_block_aligned_split",
    "DFlashDrafter.draft_id_to_target_id",
    "DiffusionGemmaWithImages.hf_to_vllm_mapper",
    "DraftBlock.supports_decode_metadata_update",
    "DrafterNetwork._fused_kv_weight",
    "DraftingRunner.rejection_sampler",
    "DraftingRunner.use_aux_hidden_state_outputs",
    "EmulatedExperts.block_quant",
    "EmulatedExperts.group_size",
    "EmulatedExperts.static_input_scales",
    "EmulatedExperts.weight_block_size",
    "EmulatedExperts.weight_quant",
    "EmulatedNvfp4Linear.group_size",
    "EmulatedNvfp4Linear.kernel",
    "EmulatedNvfp4Linear.use_a16",
    "NoiseDrafter.num_query_per_req",
    "NoiseDrafter.requires_non_causal",
    "NoiseDrafter.sample_from_anchor",
    "PreparingEngine.logger_manager",
    "PreparingLLM.logger_manager",
    "SelfDrafter.draft_attn_layer_names",
    "SelfDrafter.requires_non_causal",
    "SelfDrafter.supports_decode_metadata_update",
    "ServerConfig.speculative_config",
    "Steered.draft_logits",
    "TypedGemma._arg_converter",
}


def test_an_attribute_of_a_base_that_vllm_renames_is_noticed():
    found = set()
    for line in subclasses_of_vllm().values():
        theirs = {name for base in line if not base.is_ours for name in members(base)}
        for ours in (one for one in line if one.is_ours):
            found |= {f"{ours.node.name}.{name}" for name in set_on_self(ours) & theirs}
    assert found == SET_IN_SUBCLASSES
