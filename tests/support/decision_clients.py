"""Asks a server typed decisions through LiteLLM and LangChain; run with these on Python's path.

``python decision_clients.py URL MODEL`` writes what each answered as JSON.
"""

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads a table of prices

TEXT = "Ann has 34, Bob has 51."
OPENAI = [
    {"type": "predicate", "instructions": "Ann has more", "name": "more"},
    {"type": "choice", "instructions": "Who?", "choices": [{"value": "Ann"}, {"value": True}]},
    {"type": "score", "instructions": "How many?", "levels": [{"label": "few"}, {"label": "all"}]},
]
SYSTEMONE = {
    "more": {"type": "noul", "instructions": "Ann has more"},
    "who": {"type": "choice", "instructions": "Who?", "criteria": {"Ann": None, "Bob": "second"}},
    "many": {"type": "score", "instructions": "How many?", "criteria": ["few", "all"]},
}


def ask_litellm(url: str, model: str) -> dict[str, Any]:
    import litellm

    found = {}
    for provider in ("openai", "hosted_vllm"):
        given = {"model": f"{provider}/{model}", "api_base": url, "api_key": "none"}
        asked = given | {"input": TEXT, "questions": OPENAI}
        found[f"{provider} decisions"] = litellm.decisions(**asked)
        found[f"{provider} adecisions"] = asyncio.run(litellm.adecisions(**asked))
        found[f"{provider} systemone"] = litellm.systemone(**given, state=TEXT, questions=SYSTEMONE)
    return {name: answer.model_dump(mode="json") for name, answer in found.items()}


def ask_langchain(url: str, model: str) -> dict[str, Any]:
    from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score

    client = OpenAIDecisions(model=model, base_url=url, api_key="none")
    questions = {
        "more": Predicate(instructions="Ann has more"),
        "who": Choice(instructions="Who?", choices={"Ann": "first", "Bob": "second"}),
        "many": Score(instructions="How many?", levels=["few", "all"]),
    }
    asked = {"input": TEXT, "questions": questions}
    return {
        "langchain invoke": client.invoke(asked).model_dump(mode="json"),
        "langchain ainvoke": asyncio.run(client.ainvoke(asked)).model_dump(mode="json"),
        "langchain batch": client.batch([asked, asked])[1].model_dump(mode="json"),
    }


if __name__ == "__main__":
    print(json.dumps(ask_litellm(*sys.argv[1:]) | ask_langchain(*sys.argv[1:])))
