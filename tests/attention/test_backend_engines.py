"""Our attention backend under vLLM's real engine, its kernel in Triton's interpreter.

The engines run in a process of their own (``tests/support/attention_backend_worker.py``).
"""

import json

import pytest
import torch

from tests.support import hf_reference
from tests.support.engine_harness import Run, SamplingParams, assert_same_runs, get_engine
from tests.support.process import run_python

pytestmark = pytest.mark.slow

CANVAS, WINDOW = 12, 16
# Numbers of tokens with a full graph. Two canvases of these are padded to three.
GRAPHS = {"graphs": [CANVAS, 3 * CANVAS], "is_async": True}
FAMILIES = ("llada2", "nemotron")


@pytest.fixture(scope="module")
def runs(checkpoint, family, tmp_path_factory):
    """What engines report, all of one process (``attention_backend_worker.run``)."""
    path = checkpoint(canvas_length=CANVAS, sliding_window=WINDOW, canvas_window="anchored")
    jobs = {"gemma": {"checkpoint": str(path)}}
    jobs["flash"] = jobs["gemma"] | {"flash": True}
    path = checkpoint(canvas_length=CANVAS, sliding_window=WINDOW, canvas_window="symmetric")
    jobs["symmetric"] = {"checkpoint": str(path)}
    jobs["symmetric, flash"] = jobs["symmetric"] | {"flash": True}
    jobs["symmetric, flash, graphs"] = jobs["symmetric, flash"] | GRAPHS
    for name in FAMILIES:
        of_family = {"checkpoint": str(family(name)), "page_size": 32}
        jobs[name] = of_family | {"graphs": [32, 64], "is_async": True}
    output = tmp_path_factory.mktemp("backend") / "runs.pt"
    worker = ("-m", "tests.support.attention_backend_worker", json.dumps(jobs), str(output))
    run_python(*worker)
    return torch.load(output)


def found(run):
    """What a job has generated."""
    return [Run(*pair) for pair in zip(run["tokens"], run["logits"], strict=True)]


def test_generations_and_first_steps_logits_equal_hugging_face(runs):
    """Tokens of random weights are robust; logits are not."""
    run = runs["gemma"]
    model = hf_reference.load_hf(run["checkpoint"])
    given = zip(run["prompts"], run["tokens"], run["logits"], (1, 2), strict=True)
    for prompt, tokens, logits, seed in given:
        answer = hf_reference.generate_with_noise(model, prompt, 2, seed=seed)
        assert tokens == answer.tokens
        reference = hf_reference.one_step_logits(model, prompt, answer.canvases[0][0])
        error = (logits[:CANVAS] - reference).abs().max() / reference.abs().max()
        assert error < 1e-4  # fp32 sums in another order; see test_parity.py


def test_one_pass_mixed_every_kind_of_row(runs):
    run = runs["gemma"]
    assert {is_anchored for _, is_anchored, _ in run["calls"]} == {True, False}
    batches = [[sequence[:2] for sequence in sequences] for *_, sequences in run["calls"]]
    canvas, block, prompt = (CANVAS, 0), (CANVAS, 1), (37, 1)
    assert any(canvas in batch and block in batch for batch in batches), "no block with a canvas"
    assert any(prompt in batch for batch in batches), "no prompt"


def test_each_layer_checks_its_tensors_once(runs):
    run = runs["gemma"]
    assert len(run["calls"]) > 4 * run["layers"] > 0
    assert run["checks"] == {"check_inputs": run["layers"], "check_write": run["layers"]}


def kinds_of(calls, window):
    """Of each call in layers with this window: whether its sequences with keys are causal."""
    return [
        {is_causal for _, is_causal, seq_len in sequences if seq_len > 0}
        for window_of_call, _, sequences in calls
        if window_of_call == window
    ]


def test_flash_attention_serves_causal_rows_of_anchored_layers(runs):
    """On Hopper, with the tokens of our kernel: full layers whole, and in a sliding layer one call
    for each kind of a step with a prompt; emitted blocks stay with their canvases."""
    run = runs["flash"]
    assert run["tokens"] == runs["gemma"]["tokens"]
    whole = kinds_of(runs["gemma"]["calls"], None)
    assert kinds_of(run["flash_calls"], None) == whole and {0, 1} in whole
    assert not kinds_of(run["calls"], None)
    longest = [max(rows)[0] for window, _, rows in runs["gemma"]["calls"] if window == WINDOW]
    sliding = kinds_of(runs["gemma"]["calls"], WINDOW)
    assert kinds_of(run["calls"], WINDOW) == [
        {0} if length > CANVAS else kinds
        for kinds, length in zip(sliding, longest, strict=True)
        if 0 in kinds
    ]
    assert {0, 1} in kinds_of(run["calls"], WINDOW)
    causal = [rows for window, _, rows in run["flash_calls"] if window == WINDOW]
    assert all(1 in kinds for kinds in kinds_of(run["flash_calls"], WINDOW))
    assert {seq_len for rows in causal for _, is_causal, seq_len in rows if not is_causal} == {1}


@pytest.mark.parametrize("name", ["symmetric, flash", "symmetric, flash, graphs"])
def test_flash_attention_reads_no_page_in_front_of_a_window(name, runs):
    """In full graphs, too, whose canvases lie behind other lengths in each step."""
    run, expected = runs[name], runs["symmetric"]
    assert_same_runs(found(run), found(expected))
    assert not run["calls"] and bool(run["replayed"]) == ("graphs" in name)
    lengths = {None: set(), WINDOW: set()}
    for window, _, sequences in run["flash_calls"]:
        lengths[window] |= {seq_len for rows, _, seq_len in sequences if rows == CANVAS}
    assert max(lengths[None]) > 3 * 16 > max(lengths[WINDOW]) >= WINDOW + CANVAS - 1


@pytest.mark.parametrize("name", FAMILIES)
def test_tapes_of_families_do_the_same_as_on_vllms_cpu_kernel(name, runs):
    """Here in full graphs. There, each block of a causal sequence is a sequence of its own."""
    engine = get_engine(runs[name]["checkpoint"], max_model_len=128, max_num_batched_tokens=64)
    params = [SamplingParams(max_tokens=24, seed=seed, ignore_eos=True) for seed in (1, 2)]
    assert_same_runs(found(runs[name]), engine.runs(runs[name]["prompts"], params))
    assert runs[name]["replayed"] and not runs[name]["faults"]
