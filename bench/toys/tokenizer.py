"""The tokenizer of the small models: a byte-level BPE and its chat template.

Every byte has a token, so any text can be encoded and decoded. Every digit is a token of its own,
so models read numbers digit by digit.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

# A token's id is its position in this list. The first five are as in the released tokenizer.
SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<|image|>",
    "<image|>",
)
TOKEN_ID = {token: index for index, token in enumerate(SPECIAL_TOKENS)}

# Texts are cut into these pieces, and no token reaches across them: a digit; letters with the space
# before them; other characters with the space before them; whitespace.
SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {%- if role not in ['system', 'user', 'model'] -%}
        {{- raise_exception('Unknown role ' ~ role ~ '; allowed: system, user, assistant.') -}}
    {%- endif -%}
    {{- '<|turn>' + role + '\\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}
                {{- part['text'] | trim -}}
            {%- elif part['type'] == 'image' -%}
                {{- '<|image|>' -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\\n' -}}
{%- endif -%}
"""


def make_tokenizer(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of ``vocab_size`` tokens whose merges are learned from these texts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", TOKEN_ID["<bos>"])]
    )
    return tokenizer


def knows_questions(checkpoint: Path) -> bool:
    """Whether a checkpoint is one of our small models, judged by its tokenizer."""
    path = checkpoint / "tokenizer.json"
    if not path.exists():
        return False
    tokenizer = Tokenizer.from_file(str(path))
    return all(tokenizer.token_to_id(token) == index for token, index in TOKEN_ID.items())


def encode_prompt(tokenizer: Tokenizer, question_text: str) -> list[int]:
    """The ids of one user message as the chat template writes it, up to where the answer starts."""
    text = f"<bos><|turn>user\n{question_text.strip()}<turn|>\n<|turn>model\n"
    return tokenizer.encode(text, add_special_tokens=False).ids


def save_tokenizer(tokenizer: Tokenizer, path: Path, model_max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into a directory."""
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (path / "tokenizer_config.json").write_text(text)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
