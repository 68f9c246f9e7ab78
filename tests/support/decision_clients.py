"""Asks a server through LiteLLM and LangChain; run with these on Python's path.

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
SAID = [
    {"role": "user", "content": "Write name, age and city as JSON: Lou is 28 and lives in Baku."}
]
PERSON = {
    "title": "person",
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def chat_litellm(url: str, model: str) -> dict[str, Any]:
    import litellm

    found = {}
    for provider in ("openai", "hosted_vllm"):
        asked = {"model": f"{provider}/{model}", "api_base": url, "api_key": "none"}
        asked |= {"messages": SAID, "seed": 1, "max_tokens": 64}
        parts = litellm.completion(**asked, stream=True)
        found[f"{provider} chat"] = litellm.completion(**asked).choices[0].message.content
        found[f"{provider} achat"] = (
            asyncio.run(litellm.acompletion(**asked)).choices[0].message.content
        )
        found[f"{provider} stream"] = "".join(part.choices[0].delta.content or "" for part in parts)
    return found


def chat_langchain(url: str, model: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    client = ChatOpenAI(model=model, base_url=url, api_key="none", seed=1, max_tokens=64)
    return {
        "langchain chat": client.invoke(SAID).content,
        "langchain achat": asyncio.run(client.ainvoke(SAID)).content,
        "langchain stream": "".join(part.content for part in client.stream(SAID)),
        "langchain structured": client.with_structured_output(PERSON).invoke(SAID),
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
    answers: dict[str, Any] = {}
    for ask in (ask_litellm, ask_langchain, chat_litellm, chat_langchain):
        answers |= ask(*sys.argv[1:])
    print(json.dumps(answers))
