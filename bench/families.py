"""Denoise steps and right answers by task family: one question at a time, counted for each.

Steps come from the server's counter, read before and after each answer, so that a histogram over
answers can be drawn; ``vllm bench serve`` only knows the sum over a run.
"""

import math

from bench.measure import IN_CANVAS_PASSES, NO_CANVAS
from bench.race import Contestant
from bench.workloads import ANSWER_TOKENS
from dllm.tasks.suite import FAMILIES, questions

QUESTION_SEED = 10_000  # not among the seeds of the timed runs


def answers(contestant: Contestant, canvas_length: int, each: int) -> list[dict[str, object]]:
    """One row a question, ``each`` of every family.

    Raises:
        RuntimeError: a question was not answered.
    """
    server = contestant.server
    assert server is not None
    rows: list[dict[str, object]] = []
    for question in questions(FAMILIES, "heldout", each, QUESTION_SEED):
        before = server.canvas_positions()
        answer = server.chat(question.prompt, ANSWER_TOKENS)
        if answer.status != 200:
            raise RuntimeError(f"{contestant.name}: HTTP {answer.status}: {answer.error}")
        passes = (server.canvas_positions() - before) / canvas_length
        blocks = math.ceil(answer.num_tokens / canvas_length)
        steps = passes - (blocks if contestant.commits == IN_CANVAS_PASSES else 0)
        is_diffusion = contestant.commits != NO_CANVAS
        rows.append(
            {
                "contestant": contestant.name,
                "family": question.family,
                "correct": int(question.is_correct(answer.text)),
                "output_tokens": answer.num_tokens,
                "blocks": blocks if is_diffusion else None,
                "denoise_steps": steps if is_diffusion else None,
                "steps_per_block": steps / blocks if is_diffusion else None,
            }
        )
    return rows
