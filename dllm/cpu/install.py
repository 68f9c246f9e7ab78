"""Which of vLLM's Triton kernels are replaced on a CPU, and by what."""

from collections.abc import Callable, Mapping

from dllm.cpu.batch import BATCH_KERNELS
from dllm.cpu.drafting import DRAFTING_KERNELS
from dllm.cpu.edits import LOGIT_EDIT_KERNELS
from dllm.cpu.logits import LOGITS_KERNELS
from dllm.cpu.ragged import Kernel
from dllm.cpu.sampling import SAMPLING_KERNELS

# Kernels that vLLM launches for every model.
MODEL_KERNELS: dict[str, Kernel] = {**BATCH_KERNELS, **LOGITS_KERNELS, **LOGIT_EDIT_KERNELS}
# Kernels that it launches for autoregressive models and drafters only: a diffusion model has a
# sampler of its own.
TOKEN_KERNELS: dict[str, Kernel] = {**SAMPLING_KERNELS, **DRAFTING_KERNELS}


def install(
    register_kernels: Callable[[Mapping[str, Kernel]], None], include_sampling: bool = False
) -> None:
    """Put our functions in the place of vLLM's Triton kernels, in this process.

    Args:
        register_kernels: vllm.triton_utils.dispatcher.register_kernels.
        include_sampling: replace also the kernels that autoregressive models and drafters need.
    """
    register_kernels(MODEL_KERNELS)
    if include_sampling:
        register_kernels(TOKEN_KERNELS)
