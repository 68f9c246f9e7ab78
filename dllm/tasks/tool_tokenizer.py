"""The tokenizer of the small model that calls tools, and its chat template.

A byte-level BPE like that of ``tokenizer``, with the marks that the parsers of vLLM look for:

- Gemma 4's (``--tool-call-parser gemma4``, ``--reasoning-parser gemma4``), all special tokens;
- Hermes's ``<tool_call>`` and ``</tool_call>`` (``--tool-call-parser hermes``), which are tokens
  but no special ones, as in Qwen's tokenizers.

The template takes two arguments. ``tool_style`` is ``gemma`` (default) or ``hermes``: how tools are
listed, called and answered. ``enable_thinking`` (default: false) asks for a thought first; without
it the prompt ends with an empty thought, as in Gemma 4's larger models. Of each parameter the
template lists name and type alone: of a whole schema a small model would read four times as many
tokens.
"""

import re

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from dllm.tasks.chat import Chat
from dllm.tasks.suite import TOOL_FAMILIES, Question
from dllm.tasks.tokenizer import (
    SPECIAL_TOKENS,
    corpus_questions,
    make_tokenizer,
    weighted_pieces,
)

VOCAB_SIZE = 704
GEMMA_TOKENS = (
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|channel>",
    "<channel|>",
    "<|think|>",
)
HERMES_TOKENS = ("<tool_call>", "</tool_call>")

TOOL_CHAT_TEMPLATE = """\
{%- set hermes = (tool_style | default('gemma')) == 'hermes' -%}
{%- set thinking = enable_thinking | default(false) -%}
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- elif content -%}
        {%- for part in content -%}
            {%- if part['type'] == 'text' -%}
                {{- part['text'] | trim -}}
            {%- elif part['type'] == 'image' -%}
                {{- '<|image|>' -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro gemma(value) -%}
    {%- if value is string -%}
        {{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for key, inner in value | dictsort -%}
            {{- key + ':' + gemma(inner) -}}{{- ',' if not loop.last -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}
        {%- for inner in value -%}{{- gemma(inner) -}}{{- ',' if not loop.last -}}{%- endfor -%}
        {{- ']' -}}
    {%- else -%}
        {{- value | tojson -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro listed(tool) -%}
    {%- set parameters = (tool['function']['parameters'] or {})['properties'] or {} -%}
    {{- '{"name": "' if hermes else '<|tool>declaration:' -}}
    {{- tool['function']['name'] -}}
    {{- '", "parameters": {' if hermes else '{' -}}
    {%- for name, schema in parameters | dictsort -%}
        {%- set type = schema['type'] if schema['type'] is string else 'any' -%}
        {%- if hermes -%}
            {{- '"' + name + '": "' + type + '"' -}}{{- ', ' if not loop.last -}}
        {%- else -%}
            {{- name + ':' + type | upper -}}{{- ',' if not loop.last -}}
        {%- endif -%}
    {%- endfor -%}
    {{- '}}\\n' if hermes else '}<tool|>' -}}
{%- endmacro -%}
{%- macro called(call) -%}
    {%- set function = call['function'] -%}
    {%- if hermes -%}
        {{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' -}}
        {{- function['arguments'] | tojson + '}\\n</tool_call>' -}}
    {%- else -%}
        {{- '<|tool_call>call:' + function['name'] -}}
        {{- gemma(function['arguments']) + '<tool_call|>' -}}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set has_system = messages and messages[0]['role'] in ['system', 'developer'] -%}
{%- if thinking or tools or has_system -%}
    {{- '<|turn>system\\n' -}}
    {%- if thinking -%}{{- '<|think|>\\n' -}}{%- endif -%}
    {%- if has_system -%}{{- text(messages[0]['content']) -}}{%- endif -%}
    {%- if tools -%}
        {{- '<tools>\\n' if hermes -}}
        {%- for tool in tools -%}{{- listed(tool) -}}{%- endfor -%}
        {{- '</tools>' if hermes -}}
    {%- endif -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {%- if role not in ['user', 'model', 'tool'] -%}
        {{- raise_exception('Role ' ~ role ~ '; allowed: system first, user, assistant, tool') -}}
    {%- endif -%}
    {{- '<|turn>' + role + '\\n' -}}
    {%- if role == 'tool' and hermes -%}
        {{- '<tool_response>\\n' + text(message['content']) + '\\n</tool_response>' -}}
    {%- elif role == 'tool' -%}
        {{- '<|tool_response>response:' + (message['name'] or 'tool') + '{value:' -}}
        {{- gemma(text(message['content'])) + '}<tool_response|>' -}}
    {%- else -%}
        {{- text(message['content']) -}}
        {%- for call in message['tool_calls'] or [] -%}{{- called(call) -}}{%- endfor -%}
    {%- endif -%}
    {{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\\n' -}}
    {{- '' if thinking else '<|channel>thought\\n<channel|>' -}}
{%- endif -%}
"""


def chat_text(question: Question) -> str:
    """A question as the chat template writes it, up to where the answer starts."""
    chat = question.chat or Chat()
    rendered, _ = render_jinja_template(
        conversations=[[{"role": "user", "content": question.prompt}]],
        tools=chat.schemas or None,
        chat_template=TOOL_CHAT_TEMPLATE,
        add_generation_prompt=True,
        bos_token="<bos>",
        **chat.template_kwargs,
    )
    return rendered[0]


def encode_chat(tokenizer: Tokenizer, question: Question) -> list[int]:
    """The ids of a question, up to where the answer starts."""
    return tokenizer.encode(chat_text(question), add_special_tokens=False).ids


def train_tool_tokenizer() -> Tokenizer:
    """The tokenizer, learned from training questions. Always the same."""
    marks = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + GEMMA_TOKENS + HERMES_TOKENS)))
    texts = (
        text
        for drawn in corpus_questions(TOOL_FAMILIES)
        for text in marks.split(chat_text(drawn) + drawn.answer)
    )
    return make_tokenizer(
        weighted_pieces(texts), VOCAB_SIZE, special=GEMMA_TOKENS, plain=HERMES_TOKENS
    )
