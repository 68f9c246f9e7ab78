"""Each kernel of dllm/cpu does what the Triton kernel that it replaces does.

The Triton kernels run in Triton's interpreter, all cases in one subprocess
(triton_interpreter_worker.py), and every tensor is compared after the launch.
"""

import copy
import inspect
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the originals run in Triton's interpreter")

from dllm.cpu import kernels
from dllm.patches.cpu import parameters_of
from dllm.settings.vllm_names import is_0_32
from tests.support.cpu_drafting_cases import drafting_cases
from tests.support.cpu_kernel_cases import GPU, Case, f32, i32, i64, spans, state_cases
from tests.support.cpu_sampling_cases import sampling_cases
from tests.support.process import run_python
from tests.support.triton_interpreter_worker import launch

KERNELS = kernels.kernels(parameters_of, is_0_32())
PREFIX = "vllm.v1.worker.gpu."
# Sizes of tiles, which no replacement has; nor has it strides.
TILES = {
    *("BLOCK", "BLOCK_K", "BLOCK_SIZE", "LOGITS_BLOCK_SIZE", "LOOKAHEAD_BLOCK", "PADDED_COLS"),
    *("START_LEN", "NATURAL_END_LEN", "END_LEN"),  # a tensor has its own
    *("TOKEN_BLOCK", "TOPK_BLOCK_SIZE", "TRITON_BLOCK_SIZE"),
}
# Other parameters of vLLM's kernels that a replacement does without: what its tensors say by
# themselves, context parallelism, and random draws, which a selector does not make on a CPU.
UNUSED = {
    "block_table._compute_slot_mappings_kernel": {"cp_rank", "dcp_sharded", "CP_INTERLEAVE"},
    "input_batch._post_update_kernel": {"num_draft_tokens"},
    "metrics.logits._num_nans_kernel": {"vocab_size"},
    "model_states.prompt_embeds._apply_prompt_embeds_kernel": {"hidden_size"},
    "sample.gumbel._temperature_kernel": {"vocab_size"},
    "sample.logit_bias._bias_kernel": {"vocab_size"},
    "sample.logprob._ranks_kernel": {"vocab_size"},
    "sample.logprob._topk_log_softmax_kernel": {"topk", "vocab_size"},
    "sample.min_p._min_p_kernel": {"vocab_size"},
    "sample.thinking_budget._thinking_budget_kernel": {
        *("cached_last_start_ptr", "cached_last_end_ptr"),
    },
    "sample.thinking_budget._update_committed_marker_cache_kernel": {
        *("req_ids_ptr", "thinking_token_budget_ptr", "all_token_ids_ptr", "total_len_ptr"),
        *("cached_last_start_ptr", "cached_last_end_ptr", "cached_scan_pos_ptr", "MAX_LEN"),
        *("reasoning_start_token_ids_ptr", "natural_reasoning_end_token_ids_ptr"),
    },
    "spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": {"cp_rank", "CP_INTERLEAVE"},
    "spec_decode.dflash2.speculator._selector_walk_kernel": {
        *("req_state_ptr", "sample_pos_ptr", "seeds_ptr", "temperature_ptr", "USE_FP64"),
    },
    "spec_decode.target_dependent_ar.speculator._update_draft_inputs_kernel": {"hidden_size"},
}


def host_cases() -> dict[str, tuple[str, dict[str, Any], float]]:
    """Calls of functions of vLLM that launch kernels: (function, arguments, tolerance).

    Among them is every function that passes launch options to a kernel.
    """
    rng = np.random.default_rng(3)
    logits, expanded = f32(rng.normal(0, 2, (6, 3000))), i64([2, 0, 0, 3, 1, 1])
    sampling = dict(
        logits=logits,
        expanded_idx_mapping=expanded,
        temperature=f32([0.7, 0.0, 1.0, 1.4]),
        seed=i64([7, -1, 2**62 + 12345, 0]),
        pos=i64(rng.integers(0, 999, 6)),
        apply_temperature=True,
        is_drafting=False,
    )
    post_update = dict(
        idx_mapping=i64([3, -1, 1]),
        num_computed_tokens=i32([5, 6, 7, 8]),
        last_sampled_tokens=i64(np.zeros((4, 1))),
        output_bin_counts=i32(np.zeros((4, 9))),
        sampled_tokens=i64(rng.integers(0, 9, (3, 4))),
        num_sampled=i32([4, 1, 2]),
        num_rejected=i32([0, 0, 3]),
        query_start_loc=spans([4, 1, 6]),
        all_token_ids=i32(np.zeros((4, 30))),
        total_len=i32([5, 6, 7, 8]),
    )
    top = dict(logits=logits, num_logprobs=5, sampled_token_ids=i64(rng.integers(0, 3000, 6)))
    return {
        "gumbel, fp32": ("sample.gumbel.gumbel_sample", sampling, 0),
        "gumbel, fp64": ("sample.gumbel.gumbel_sample", sampling | dict(use_fp64=True), 0),
        "drafts": ("input_batch.post_update", post_update, 0),
        "top 5": ("sample.logprob.compute_topk_scores", top, 2e-6),
    }


CASES = state_cases() + sampling_cases() + drafting_cases()
HOST_CASES = host_cases()


@pytest.fixture(scope="session")
def triton_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the Triton kernels made of every case."""
    folder = tmp_path_factory.mktemp("triton")
    job = {
        "kernels": list(KERNELS),
        "cases": [asdict(case) for case in CASES],
        "host_cases": [(GPU + function, args) for function, args, _ in HOST_CASES.values()],
    }
    torch.save(job, folder / "cases")
    run_python(
        "-m",
        "tests.support.triton_interpreter_worker",
        str(folder / "cases"),
        str(folder / "results"),
        environment={"TRITON_INTERPRET": "1"},
    )
    results: dict[str, Any] = torch.load(folder / "results")
    return results


def assert_same(ours: Any, theirs: Any, rtol: float, what: str) -> None:
    """Compare tensors, lists of them and plain values; integers and poison exactly."""
    if isinstance(ours, list | tuple):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, rtol, f"{what}[{index}]")
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(
            ours, theirs, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )
    else:
        assert ours == theirs, what


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.id for case in CASES])
def test_equals_triton(index: int, triton_results: dict[str, Any]) -> None:
    case: Case = copy.deepcopy(CASES[index])
    known = triton_results["arg_names"][case.kernel]  # vLLM 0.32 has some less than 0.33
    given = {name: value for name, value in case.args.items() if name in known}
    launch(KERNELS[case.kernel], given)
    theirs = triton_results["args"][index]
    for name, value in given.items():
        assert_same(value, theirs[name], case.rtol, name)


@pytest.mark.parametrize("name", HOST_CASES)
def test_vllm_functions_are_the_same_with_our_kernels(
    name: str, triton_results: dict[str, Any]
) -> None:
    """Goes through vLLM's own launches: positional tensors, keyword constants, launch options."""
    results = dict(zip(HOST_CASES, triton_results["host"], strict=True))
    (their_result, their_args), (our_result, our_args) = results[name]
    *_, rtol = HOST_CASES[name]
    assert_same(our_result, their_result, rtol, "result")
    for argument, value in our_args.items():
        assert_same(value, their_args[argument], rtol, argument)


def test_every_kernel_is_tested() -> None:
    assert {case.kernel for case in CASES} == set(KERNELS)
    assert {f"{PREFIX}{name}" for name in UNUSED} < set(KERNELS)


def test_vllm_launches_our_kernels_after_install(triton_results: dict[str, Any]) -> None:
    assert triton_results["replaced"] == list(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_parameters_are_still_vllms(name: str, triton_results: dict[str, Any]) -> None:
    """vLLM has the parameters that the replacement was written against, and no other ones.

    Ours may have more, with defaults: what another version of vLLM does not pass.
    """
    theirs = {*triton_results["arg_names"][name]}
    ours = inspect.signature(kernels.KERNELS[name]).parameters.values()
    assert {one.name for one in ours if one.default is one.empty} <= theirs
    unused = {one for one in theirs - {one.name for one in ours} if "_stride" not in one}
    assert unused - TILES == UNUSED.get(name.removeprefix(PREFIX), set()) & theirs


def test_gather_zeroes_every_padding_row() -> None:
    """The launch grid, which would say how many there are, does not reach a replacement."""
    name = "vllm.v1.worker.gpu.block_table._gather_block_tables_kernel"
    case = copy.deepcopy(next(case for case in CASES if case.kernel == name))
    launch(KERNELS[name], case.args)
    for table in case.args["dst_block_table_ptrs"]:
        assert not table[case.args["num_reqs"] :].any()


def test_rank_of_an_impossible_token_is_the_vocabulary() -> None:
    """Where a replacement differs on purpose: Triton's block padding is not counted."""
    name = "vllm.v1.worker.gpu.sample.logprob._ranks_kernel"
    rank = torch.empty(1, dtype=torch.int64)
    logits = torch.tensor([[1.0, -torch.inf, 3.0]])
    KERNELS[name](rank, logits, 3, torch.tensor([1]), 3, BLOCK_SIZE=8192)
    assert rank.tolist() == [3]
