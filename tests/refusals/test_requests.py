"""What a request is refused for, whoever sends it: (model, parameters, the name of what is wrong).

The entrance is that of an engine, behind which nothing looks again; a server refuses the same
before it sends a byte (``test_http``). What messages say is in ``tests/settings/test_request.py``.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from tests.support.drafter_harness import drafting_engine
from tests.support.drafter_pairs import write_drafter, write_target
from tests.support.engine_harness import Engine
from tests.support.engine_models import BLOCKS, SIZES
from tests.support.family_checkpoints import MASK

VOCAB_SIZE, LENGTH = 512, 512  # of the model, and of what it may be given at most
CANVAS = list(range(32))
FLOATS = [f"diffusion_{name}" for name in ("t_min", "t_max", "entropy_bound", "confidence")]
FLAGS = [f"diffusion_{name}" for name in ("read_only", "constrained", "eos_stop")]
SEEDED = {"diffusion_seed_canvas": CANVAS}
BAD_INTEGERS = [-1, True, False, "3", [3], {}, 3.5, math.nan]
BAD_FLOATS = [-0.5, True, "0.5", [0.5], {}, math.nan, math.inf, 2**62]
BAD_IDS = ["x", 5, [1, "2"], [True] * 32, [1.0] * 32, {}, [[1]]]
GRAMMAR = StructuredOutputsParams(json={"type": "object"})
CHOICE = StructuredOutputsParams(choice=["yes"])

# Of extra arguments: (the one that is wrong, its value, those beside it).
EXTRA: list[tuple[str, Any, dict[str, Any]]] = [
    *(("diffusion_canvas_length", x, {}) for x in [0, 33, 2**62, *BAD_INTEGERS]),
    *(("diffusion_max_steps", x, {}) for x in [0, *BAD_INTEGERS]),
    *((key, x, {}) for key in FLOATS for x in BAD_FLOATS),
    *((key, 0, {}) for key in FLOATS if key != "diffusion_confidence"),
    *(("diffusion_seed_canvas", x, {}) for x in BAD_IDS),
    *(("diffusion_pinned", x, SEEDED) for x in BAD_IDS),
    *((key, x, {}) for key in FLAGS for x in [2, -1, "true", 1.0, [1], {}]),
    *(("diffusion_trace", x, {})
      for x in [2, "entropy", ["steps"], ["entropy", 1], 1.0, {}, [[1]]]),
    ("diffusion_stream", "text", {}),  # frames go to a watcher over HTTP
    ("diffusion_pin_mode", "force", {}),
    ("diffusion_pin_ids", ["a"], {"diffusion_pin_at": [0]}),
    *(("diffusion_seed_canvas", [1] * length, {}) for length in (0, 31, 33)),
    *(("diffusion_seed_canvas", [x, *CANVAS[1:]], {}) for x in (-2, VOCAB_SIZE, 2**40)),
    *(("diffusion_pinned", [3, position], SEEDED) for position in (-1, 32, 2**40)),
    ("diffusion_pinned", [3], {}),
    ("diffusion_pinned", [1, 0], {"diffusion_seed_canvas": [-1, *CANVAS[1:]]}),
    *(("diffusion_pin_at", at, {"diffusion_pin_ids": ids}) for at, ids in (
        ([1, 2], [3]), ([1], None), ([1, 1], [3, 4]), ([-1], [3]), ([LENGTH], [3]))),
    ("diffusion_pin_at", [3], SEEDED | {"diffusion_pinned": [3], "diffusion_pin_ids": [9]}),
    *(("diffusion_pin_ids", [x], {"diffusion_pin_at": [1]}) for x in (-1, VOCAB_SIZE)),
]  # fmt: skip
CONSTRAINED = {"extra_args": {"diffusion_constrained": True}}
FOR_ONE = CONSTRAINED | {"logprob_token_ids": [1]}
HELD = {"diffusion_pin_at": [1], "diffusion_pin_ids": [40], "diffusion_pin_mode": "hold"}
HINT = HELD | {"diffusion_pin_mode": "hint"}
PARAMETERS: list[tuple[dict[str, Any], str]] = [
    (CONSTRAINED, "diffusion_constrained"),
    (FOR_ONE | {"allowed_token_ids": [1]}, "diffusion_constrained"),
    *((dict(repetition_penalty=x), "repetition_penalty") for x in (1e-5, 1e5)),
    *((dict(logit_bias={3: 1.0, 4: x}), "logit_bias")
      for x in (-math.inf, math.inf, math.nan, 1e7)),
    (dict(logit_bias={10**6: 1.0}), "logit_bias"),
    (dict(allowed_token_ids=[]), "allowed_token_ids"),
    (dict(allowed_token_ids=[1, 10**6]), "allowed_token_ids"),
    (dict(min_tokens=2**30, max_tokens=None), "min_tokens"),
    *((FOR_ONE | {name: 2**40}, name) for name in (
        "max_tokens", "top_k", "thinking_token_budget", "prompt_logprob_start", "stream_interval")),
    (FOR_ONE | {"repetition_detection": RepetitionDetectionParams(2**40, 0, 2)},
     "repetition_detection"),
    (dict(prompt_logprob_token_ids=np.array([[1, 2]])), "prompt_logprob_token_ids"),
    (dict(logprobs=10**6), "logprobs"),  # by vLLM's own check
    # Beside a grammar.
    (dict(structured_outputs=GRAMMAR, ignore_eos=True), "ignore_eos"),
    (dict(structured_outputs=GRAMMAR, min_tokens=3), "min_tokens"),
    (dict(structured_outputs=GRAMMAR, allowed_token_ids=[40, 41]), "allowed_token_ids"),
    (dict(structured_outputs=GRAMMAR, bad_words=["a"]), "bad_words"),
    (dict(structured_outputs=GRAMMAR, extra_args={"diffusion_read_only": True}),
     "diffusion_read_only"),
    (FOR_ONE | {"structured_outputs": GRAMMAR}, "diffusion_constrained"),
    # Held pins behind the end of the answer.
    (dict(max_tokens=32, ignore_eos=True, extra_args=HELD | {"diffusion_pin_at": [32]}),
     "diffusion_pin_mode"),
]  # fmt: skip
# With masks: what stays beside what forbids it, and what blocks cannot honour.
OF_MASKS: list[tuple[str, dict[str, Any], str]] = [
    *((name, dict(structured_outputs=CHOICE, extra_args=pins), parameter)
      for name in (*BLOCKS, "nemotron")
      for pins, parameter in ((HELD, "diffusion_pin_mode"), (HINT, "diffusion_pin_at"))),
    ("nemotron", dict(structured_outputs=CHOICE,
                      extra_args={"diffusion_seed_canvas": [40] * SIZES["nemotron"]}),
     "diffusion_seed_canvas"),
    *((name, dict(extra_args=HINT) | beside, "diffusion_pin_ids")
      for name in (*BLOCKS, "nemotron")
      for beside in (
          dict(allowed_token_ids=[41, 42]),
          dict(min_tokens=2, stop_token_ids=[40]),
          dict(logprob_token_ids=[41], extra_args=HINT | {"diffusion_constrained": True}))),
    ("nemotron", dict(allowed_token_ids=[41], extra_args=HELD | {
        "diffusion_seed_canvas": [41] * (SIZES["nemotron"] - 1) + [40]}), "diffusion_seed_canvas"),
    *((name, dict(extra_args=HELD | {"diffusion_pin_ids": [MASK]}), "diffusion_pin_ids")
      for name in BLOCKS),
    *((name, given, parameter) for name in BLOCKS for given, parameter in (
        (dict(prompt_logprobs=1), "prompt_logprobs"),
        (dict(allowed_token_ids=[MASK]), "allowed_token_ids"),
        (dict(extra_args={"diffusion_seed_canvas": [5] * SIZES[name]}), "diffusion_seed_canvas"),
        (dict(extra_args={"diffusion_canvas_length": SIZES[name] - 1}), "diffusion_canvas_length"),
        (dict(extra_args={"diffusion_t_min": 0.5}), "diffusion_t_min"))),
    ("sdar", dict(extra_args={"diffusion_strategy": "random"}), "diffusion_strategy"),
    ("sdar", dict(extra_args={"diffusion_mode": "quality"}), "diffusion_mode"),
    ("llada2", dict(extra_args={"diffusion_mode": "fast"}), "diffusion_mode"),
]  # fmt: skip
# Of a target with a drafter, and of one whose drafts are sampled.
OF_DRAFTS = [
    ("drafter", dict(logprob_token_ids=[5]), "logprob_token_ids"),
    ("sampled drafts", dict(structured_outputs=StructuredOutputsParams(regex="a+")),
     "structured_outputs"),
]  # fmt: skip
REQUESTS = [
    *(("gemma", dict(logprob_token_ids=[1], extra_args=beside | {name: value}), name)
      for name, value, beside in EXTRA),
    *(("gemma", given, parameter) for given, parameter in PARAMETERS),
    *OF_MASKS,
    *OF_DRAFTS,
]  # fmt: skip


@pytest.fixture(scope="module")
def engine_named(
    model_named: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Engine]:
    def start(name: str) -> Engine:
        if name in SIZES:
            return model_named(name).engine()
        folder = tmp_path_factory.getbasetemp()
        pair = folder / "target", folder / "drafter"
        if not pair[0].exists():
            write_target(pair[0])
            write_drafter(pair[1])
        if name == "drafter":
            return drafting_engine(*pair, 5)
        sampled = {"draft_sample_method": "probabilistic"}
        return drafting_engine(*pair, 5, {"verification": "rejection"}, speculative=sampled)

    return start


@pytest.mark.parametrize(("model", "given", "parameter"), REQUESTS)
def test_it_is_refused_by_its_name(engine_named, model, given, parameter):
    engine = engine_named(model)
    with pytest.raises(VLLMValidationError) as refused:
        engine.add([20, 21, 22, 23, 24], SamplingParams(**given))
    assert refused.value.parameter == parameter
    assert not engine.llm.llm_engine.has_unfinished_requests()
