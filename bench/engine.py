"""An ``LLM`` that is asked through a pipe: what ``servers.Engine`` starts, in a process of its own.

    python -P bench/engine.py MODEL --flags-of-vllm-serve ...

It imports nothing of this package, so that the plugin comes from where PYTHONPATH says. The first
line of its output says that it is ready. Every line of its input is JSON: ``chat``, conversations,
or ``prompts``, token ids; and ``params``, which replace fields of the model's default sampling
parameters. Each is answered with a line: the ``seconds`` of the call, ``texts`` and ``token_ids``.
"""

import json
import os
import sys
import time


def main(model: str, *flags: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints belongs into the log
    from vllm import LLM, EngineArgs, TokensPrompt
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    given.disable_log_stats = True  # as in an ``LLM(...)``
    llm = LLM.from_engine_args(given)
    print("{}", file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        params = llm.get_default_sampling_params()
        for name, value in asked["params"].items():
            setattr(params, name, value)
        start = time.perf_counter()
        if "chat" in asked:
            outputs = llm.chat(asked["chat"], params, use_tqdm=False)
        else:
            prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in asked["prompts"]]
            outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        found = [output.outputs[0] for output in outputs]
        texts, ids = [one.text for one in found], [list(one.token_ids) for one in found]
        print(json.dumps({"seconds": seconds, "texts": texts, "token_ids": ids}), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
