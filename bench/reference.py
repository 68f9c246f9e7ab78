"""Hugging Face's own ``generate``, one question after the other, in the form of a saved run."""

import json
import resource
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from dllm.tasks.suite import Question


def answer_questions(
    model: Path, generation: Path, asked: Sequence[Question], max_tokens: int, result: Path
) -> None:
    """Answer the questions and write what ``vllm bench serve --save-detailed`` would have saved.

    The first question is asked once more before the clock starts. Beside the keys of ``vllm bench
    serve`` there are ``denoise_steps``, ``blocks``, ``forward_passes`` (encoder and decoder, by
    hooks) and ``peak_memory_mib``. A block is there when the encoder begins to read it, and the
    last one when the answer is.

    Args:
        generation: folder of the generation_config.json to use.
    """
    from dllm.tools.eval_reference import ReferenceModel  # torch and transformers: seconds

    reference = ReferenceModel(model, max_tokens)
    kind = type(reference.model.generation_config)
    reference.model.generation_config = kind.from_pretrained(generation, **never_stop(generation))
    reference.answer(asked[:1], lambda: None)

    encoded: list[float] = []  # when the encoder began
    backbone = reference.model.model
    backbone.encoder.register_forward_pre_hook(lambda *_: encoded.append(time.perf_counter()))
    ends = [time.perf_counter()]
    run = reference.answer(asked, lambda: ends.append(time.perf_counter()))

    lengths = [answer.num_tokens or 0 for answer in run.answers]
    first_blocks = []
    for start, end in pairwise(ends):
        _prompt, *blocks = (moment for moment in encoded if start <= moment < end)
        first_blocks.append((blocks[0] if blocks else end) - start)
    seconds = ends[-1] - ends[0]
    saved = {
        "completed": len(run.answers),
        "failed": 0,
        "duration": seconds,
        "output_throughput": sum(lengths) / seconds,
        "output_lens": lengths,
        "generated_texts": [answer.text for answer in run.answers],
        "ttfts": first_blocks,
        "latencies": [end - start for start, end in pairwise(ends)],
        "denoise_steps": run.denoise_steps,
        "blocks": run.blocks,
        "forward_passes": len(encoded) + (run.denoise_steps or 0),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    result.write_text(json.dumps(saved))


def never_stop(generation: Path) -> dict[str, float]:
    """What says to the reference that no block stops early, if the generation config says so.

    It refuses a confidence of 0. Nothing is stable for as many steps as there are.
    """
    given = json.loads((generation / "generation_config.json").read_text())
    if given["confidence_threshold"] > 0:
        return {}
    return {"confidence_threshold": 1e-9, "stability_threshold": given["max_denoising_steps"]}
