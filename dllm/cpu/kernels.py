"""Which of vLLM's Triton kernels are replaced on a CPU, and by what."""

from dllm.cpu.batch import BATCH_KERNELS
from dllm.cpu.drafting import DRAFTING_KERNELS
from dllm.cpu.edits import LOGIT_EDIT_KERNELS
from dllm.cpu.logits import LOGITS_KERNELS
from dllm.cpu.ragged import Kernel
from dllm.cpu.sampling import SAMPLING_KERNELS

KERNELS: dict[str, Kernel] = {
    **BATCH_KERNELS,
    **LOGITS_KERNELS,
    **LOGIT_EDIT_KERNELS,
    **SAMPLING_KERNELS,
    **DRAFTING_KERNELS,
}
