"""Traces of answers, as clients get them: the field ``diffusion_trace`` of a choice.

It is a dictionary of lists over the tokens of the answer, and of lists over its blocks. Python code
has it as an attribute of vLLM's ``CompletionOutput``, and JSON in each choice; in a stream each
block is told once, and the lists of all blocks end to end are the trace of the answer.
"""

from typing import Any

from dllm.engine.frames import Frame

FIELD = "diffusion_trace"


def block_trace(frame: Frame) -> dict[str, Any] | None:
    """The trace of one block; None if the frame holds none."""
    if frame.trace is None:
        return None
    lists = {name: values for name, values in frame.trace.items() if name != "length"}
    length = frame.trace["length"]
    trace: dict[str, Any] = {name: values[:length] for name, values in lists.items()}
    trace |= {"block_lengths": [length], "block_passes": [frame.step]}
    if len(lists["token_ids"]) > length:
        trace["behind_stop"] = {name: values[length:] for name, values in lists.items()}
    return trace


def append(trace: dict[str, Any], block: dict[str, Any]) -> None:
    """Put the trace of the next block behind those in front of it, in place."""
    for name, values in block.items():
        if isinstance(values, list):
            trace.setdefault(name, []).extend(values)
        else:
            trace[name] = values
