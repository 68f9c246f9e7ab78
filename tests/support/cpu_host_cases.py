"""Cases for functions of vLLM that launch kernels; tests compare Triton with our kernels."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.cpu_kernel_cases import GPU, f32, i32, i64, spans


@dataclass
class HostCase:
    """One call of a function of vLLM that launches kernels."""

    function: str
    label: str
    args: dict[str, Any] = field(repr=False)
    rtol: float = 0.0

    @property
    def id(self) -> str:
        """What pytest calls the case."""
        return f"{self.function.rsplit('.', 1)[1]}-{self.label}"


def host_cases() -> list[HostCase]:
    """All cases, among them every function that passes launch options to a kernel."""
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
    return [
        HostCase(GPU + "sample.gumbel.gumbel_sample", "fp32", sampling),
        HostCase(GPU + "sample.gumbel.gumbel_sample", "fp64", sampling | dict(use_fp64=True)),
        HostCase(GPU + "input_batch.post_update", "drafts", post_update),
        HostCase(GPU + "sample.logprob.compute_topk_scores", "top-5", top, rtol=2e-6),
    ]
