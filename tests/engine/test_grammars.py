"""Structured outputs through vLLM's engine: always valid, and nothing else changes.

The model has random weights: it knows no format at all. What it would like to write is noise, and
what is emitted must be a text of the grammar nevertheless.
"""

import json
import re
from typing import Any

import jsonschema
import pytest
import torch
import xgrammar
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager

from dllm.engine.emitted_blocks import EmittedText, GrammarCapacity
from dllm.engine.grammars import DeviceGrammars, HostGrammars
from dllm.engine.warm_up import canvas_batch
from dllm.grammar.constraint import Constraint
from dllm.grammar.device import NOTHING, Sizes
from dllm.grammar.table import MOST_CLASSES, MOST_LABELS, MOST_STATES, Table
from dllm.grammar.viterbi import Canvas
from dllm.patches.grammars import _begin
from dllm.settings.request import with_grammar
from tests.engine.test_parity import CANVAS, prompt
from tests.support.engine_harness import blocks_of
from tests.support.grammar_paths import as_on_a_gpu
from tests.support.recorded_calls import record_calls

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</call>",
    },
}


def is_of_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


# name: (what is asked for, whether a text is right)
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": SCHEMA}, is_of_schema),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": (
        {"regex": "([a-f]{3}-){2,30}[0-9]{2}"},
        re.compile("([a-f]{3}-){2,30}[0-9]{2}").fullmatch,
    ),
    "choice": ({"choice": ["yes", "no", "perhaps"]}, {"yes", "no", "perhaps"}.__contains__),
    "grammar": (
        {"grammar": 'root ::= "(" root ")" | [0-9]+'},
        lambda text: re.fullmatch(r"\(*[0-9]+\)*", text) and text.count("(") == text.count(")"),
    ),
    "structural_tag": (
        {"structural_tag": json.dumps(TAG)},
        lambda text: is_of_schema(text.removeprefix("<call>").removesuffix("</call>")),
    ),
}


def params(kind: str | None, max_tokens: int = 4 * CANVAS, seed: int = 1, **options) -> Any:
    asked = StructuredOutputsParams(**KINDS[kind][0]) if kind else None
    return SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=asked, **options)


def text_of(engine, answer: Any) -> str:
    """The answer alone. vLLM's detokenizer may put a piece of an odd prompt in front of it."""
    return engine.llm.get_tokenizer().decode(answer.token_ids, skip_special_tokens=True)


def shortest_text(engine, sampling: SamplingParams) -> int:
    """Tokens of the shortest text that a request allows."""
    llm_engine = engine.llm.llm_engine
    llm_engine.input_processor._validate_params(sampling, ("generate",))
    return int(Table.from_bytes(_begin(llm_engine, sampling).result()).left[0])


def test_xgrammar_is_asked_by_the_process_that_compiles_alone(engine, monkeypatch):
    """It has limits of time and memory; the front end and the engine core have none."""

    def asked(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("xgrammar compiles without limits")

    for name in ("from_json_schema", "from_ebnf", "from_lark", "from_regex", "from_structural_tag"):
        monkeypatch.setattr(xgrammar.Grammar, name, asked)
    for name in ("json_schema", "grammar", "lark", "regex", "structural_tag"):
        monkeypatch.setattr(xgrammar.GrammarCompiler, f"compile_{name}", asked)
    asked_for = [params(kind) for kind in KINDS]
    for kind, output in zip(
        KINDS, engine.outputs([prompt(10)] * len(KINDS), asked_for), strict=True
    ):
        assert KINDS[kind][1](text_of(engine, output.outputs[0]))


def test_every_block_is_checked_before_it_is_served(engine, monkeypatch):
    """A block that is no text would end its request with an error, and not be served."""
    answers = record_calls(monkeypatch, StructuredOutputManager, "accept_tokens")
    engine.outputs([prompt(10)], params("json"))
    assert answers and all(is_accepted for _, is_accepted in answers)
    # If the worker wrote what it liked:
    monkeypatch.setattr(HostGrammars, "prepare", lambda *args: None)
    (output,) = engine.outputs([prompt(10)], params("json"))
    assert output.outputs[0].finish_reason == "error" and answers[-1][1] is False


def test_both_ways_through_a_canvas_are_taken(engine, monkeypatch):
    """Noise is searched; a canvas that the model writes right is only read."""
    searched, solved = (
        record_calls(monkeypatch, Canvas, name) for name in ("_search", "best_path")
    )
    engine.outputs([prompt(10)], params("json"))
    assert searched
    searched.clear()
    solved.clear()
    # With a strong bias every most likely token is allowed, but for the end of the last canvas.
    biased = params("regex", 4 * CANVAS, logit_bias={41: 1000.0})
    biased.structured_outputs = StructuredOutputsParams(regex="(.|\n)*")
    with engine.watch() as watched:
        (output,) = engine.outputs([prompt(10)], biased)
    num_last = blocks_of(watched[output.request_id])[-1]
    assert len(searched) == num_last < len(solved)


def test_the_largest_step_is_inside_the_memory_profile(engine, monkeypatch):
    """vLLM profiles with a batch that has no requests."""
    sampler, state = engine.runner.sampler, engine.runner.model_state
    on_device = as_on_a_gpu(engine, monkeypatch)
    seen = []

    def write(logits, scores, rows, prepared):
        tables = prepared.tables
        seen.append((tables.most_classes, tables.most_labels, prepared.num_states))
        return DeviceGrammars.write_(on_device, logits, scores, rows, prepared)

    on_device.write_ = write
    runner = engine.runner
    batch = canvas_batch(runner.input_buffers, runner.max_num_reqs, runner.num_speculative_steps)
    hidden = torch.zeros(batch.num_draft_tokens, state.model_config.get_hidden_size())
    sampler.profile(hidden, batch)
    most = MOST_CLASSES, MOST_LABELS, MOST_STATES + 2048 * runner.max_num_reqs
    assert seen and all(size >= least for size, least in zip(seen[0], most, strict=True))
    assert on_device.prepare.__func__ is DeviceGrammars.prepare


def test_requests_wait_for_room_for_their_tables(engine, monkeypatch):
    """Two equal tables need the room of one."""
    kinds = ["json", "regex", "json", "choice"]
    asked = [params(kind, seed=seed) for seed, kind in enumerate(kinds)]
    expected = engine.generate([prompt(12)] * 4, asked)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    sizes = [EmittedText.of_request(admitted(engine, one)).sizes for one in asked]
    tables = GrammarCapacity(
        Sizes(1, *(max(column) for column in list(zip(*sizes, strict=True))[1:])), 1 << 20
    )
    monkeypatch.setattr(scheduler, "_grammar_capacity", tables)
    held = []
    admits = GrammarCapacity.admits
    monkeypatch.setattr(
        GrammarCapacity,
        "admits",
        lambda *given: ((is_in := admits(*given)) and held.append(len({*tables._count}))) or is_in,
    )
    assert engine.generate([prompt(12)] * 4, asked) == expected
    assert set(held) == {1}
    assert not tables._count and (tables._used, tables._searched) == (NOTHING, 0)
    most = max(one.states for one in sizes)  # equal tables are searched for each request
    one_by_one = GrammarCapacity(Sizes(*[1 << 30] * 6), most)
    monkeypatch.setattr(scheduler, "_grammar_capacity", one_by_one)
    monkeypatch.setattr(
        GrammarCapacity,
        "admits",
        lambda *given: (held.append((is_in := admits(*given), one_by_one._searched))) or is_in,
    )
    held.clear()
    assert engine.generate([prompt(12)] * 4, asked) == expected
    assert {is_in for is_in, _ in held} == {True, False}
    assert max(searched for _, searched in held) == most
    nothing = GrammarCapacity(NOTHING, 0)
    monkeypatch.setattr(scheduler, "_grammar_capacity", nothing)
    large, free = engine.outputs([prompt(12)] * 2, [asked[0], params(None, max_tokens=4)])
    assert large.outputs[0].finish_reason == "error"
    assert len(free.outputs[0].token_ids) == 4


def admitted(engine, sampling: SamplingParams) -> SamplingParams:
    """With its table, as a worker gets it."""
    table = _begin(engine.llm.llm_engine, sampling).result()
    return with_grammar(sampling, Constraint.serialize(table, None))


def test_one_that_contradicts_its_grammar_ends_alone(engine, monkeypatch):
    """The worker cannot keep to it; the engine core accepts nothing that it emits."""
    expected = engine.generate([prompt(12)], [params("regex", seed=5)])
    read = Canvas.read

    def broken(self: Canvas, *given: Any) -> Any:
        if len(self.table.accepts) == num_states:
            return [0], -1
        return read(self, *given)

    table = _begin(engine.llm.llm_engine, params("json")).result()
    num_states = len(Table.from_bytes(table).accepts)
    monkeypatch.setattr(Canvas, "read", broken)
    bad, good = engine.outputs([prompt(12)] * 2, [params("json"), params("regex", seed=5)])
    assert bad.outputs[0].finish_reason == "error"
    assert [list(good.outputs[0].token_ids)] == expected


def test_it_holds_beside_a_seed_canvas_and_pins(engine):
    given = {"diffusion_seed_canvas": prompt(CANVAS, salt=9), "diffusion_pinned": [0, 3]}
    (output,) = engine.outputs([prompt(10)], params("json", extra_args=given))
    assert is_of_schema(text_of(engine, output.outputs[0]))


def test_a_stop_string_ends_a_text_early(engine):
    (output,) = engine.outputs([prompt(10)], params("json", stop=['"age"']))
    (answer,) = output.outputs
    assert answer.stop_reason == '"age"' and '"age"' not in answer.text
    assert text_of(engine, answer).lstrip().startswith("{")


def test_a_model_without_an_end_needs_a_stop_token(engine, monkeypatch):
    processor = engine.llm.llm_engine.input_processor
    monkeypatch.setattr(processor, "generation_config_fields", {})
    monkeypatch.setattr(processor.renderer, "get_eos_token_id", lambda: None)
    with pytest.raises(VLLMValidationError, match=r"no end-of-sequence token.* stop_token_ids"):
        engine.add(prompt(10), params("choice"))
    (output,) = engine.outputs([prompt(10)], [params("choice", stop_token_ids=[40])])
    assert output.outputs[0].stop_reason == 40
