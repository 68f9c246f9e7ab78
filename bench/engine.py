"""An ``LLM`` that answers conversations: one process, with its scheduler and worker.

    python -P bench/engine.py MODEL --flags-of-vllm-serve ... <asked.json >answered.json

It imports nothing of this package, so that the plugin comes from where PYTHONPATH says. Asked:
``batches`` of conversations, each of which is one call of ``LLM.chat``, and ``max_tokens``; beside
that the model's default sampling parameters. Answered: for each batch the ``seconds`` of the call,
``texts`` and their ``lengths`` in tokens.
"""

import json
import os
import sys
import time


def main(model: str, *flags: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    asked = json.load(sys.stdin)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    given.disable_log_stats = True  # as in an ``LLM(...)``
    llm, found = LLM.from_engine_args(given), []
    params = llm.get_default_sampling_params()
    params.max_tokens = asked["max_tokens"]
    for batch in asked["batches"]:
        start = time.perf_counter()
        outputs = [output.outputs[0] for output in llm.chat(batch, params, use_tqdm=False)]
        seconds, texts = time.perf_counter() - start, [one.text for one in outputs]
        lengths = [len(one.token_ids) for one in outputs]
        found.append({"seconds": seconds, "texts": texts, "lengths": lengths})
    json.dump(found, answers)
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
