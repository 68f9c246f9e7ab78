"""Chooses the batch sizes of CUDA graphs, and keeps causal spans out of full graphs.

vLLM chooses the graph of a batch from three numbers, before any attention metadata exists
(``CudaGraphManager.dispatch``): tokens, requests, and the query length if it is the same for all
requests and none reads its prompt. So the attention backend has no say in it, and our runner has
(``CanvasRunner.gather_batch_req_state``). With vLLM's default mode, ``FULL_AND_PIECEWISE``,

    canvases alone, all as wide as the model's    a FULL graph: it runs the attention, too
    causal spans, narrow canvases, images         a PIECEWISE graph, between whose pieces the
                                                  attention is launched

A full graph replays a fixed number of sequences (``engine.spans``). Canvases alone are one sequence
for each request; a causal span with a canvas behind it is two, and a prompt with images may be
many.

A batch is padded to the next captured size. vLLM's default sizes end at 512 tokens, that is, two
canvases of 256; a batch that is larger than all sizes runs without a graph.
"""

from typing import Any

from vllm import platforms
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.settings.denoising import WHOLE_SEQUENCE, block_size_of

logger = init_logger(LOGGER)

# Larger batches have no graph: they keep a GPU busy for longer than launching their kernels takes.
MOST_TOKENS = 4096
# The smallest graph. Batches with fewer tokens than a canvas are short prompts and narrow canvases.
LEAST_TOKENS = 8
# Up to here each number of canvases has a graph of its own; above, padding is at most an eighth.
EACH_UP_TO = 16


def choose_cuda_graphs(vllm_config: Any, canvas_length: int) -> None:
    """The sizes of graphs, unless the user gave some, and a mode in which no prompt is a full one.

    Call it when ``max_num_seqs`` is known.
    """
    from vllm.config import CUDAGraphMode

    if platforms.current_platform.is_cpu():
        return
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    # What a user chose: vLLM sets its defaults after this.
    sizes, largest = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
    if sizes is None and largest is None:
        compilation.cudagraph_capture_sizes = capture_sizes(
            canvas_length, scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        )
    if compilation.cudagraph_mode == CUDAGraphMode.FULL:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        logger.warning(
            "dllm: the CUDA graph mode is FULL_AND_PIECEWISE instead of FULL: a step in which a "
            "request has more than its canvas cannot be a full graph"
        )


def keep_mixed_batches_out(vllm_config: Any) -> None:
    """Call it when vLLM has made all its choices: some of its options set the mode FULL again.

    An example is ``fuse_attn_quant``, with which no graph can be in pieces. Where every token sees
    all others no batch is of canvases alone: full graphs would only take memory.
    """
    from vllm.config import CUDAGraphMode

    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode == CUDAGraphMode.FULL:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    if block_size_of(vllm_config) == WHOLE_SEQUENCE:
        compilation.cudagraph_mode = compilation.cudagraph_mode.mixed_mode()


def capture_sizes(canvas_length: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens for which graphs are captured, ascending.

    They are the multiples of a canvas up to what ``max_num_seqs`` requests need that all have an
    emitted block in front of their canvas, but at most ``MOST_TOKENS`` (or one canvas) and the
    largest batch; and halves of a canvas. With blocks a row is a whole block wide in every step.
    """
    most = min(2 * max_num_seqs * canvas_length, max(MOST_TOKENS, canvas_length))
    most = min(most, max_num_batched_tokens)
    sizes = []
    part = canvas_length // 2
    while part >= LEAST_TOKENS:
        sizes.append(part)
        part //= 2
    count, step = 1, 1
    while count * canvas_length <= most:
        sizes.append(count * canvas_length)
        if count >= EACH_UP_TO * step:
            step *= 2
        count += step
    return sorted(sizes)
