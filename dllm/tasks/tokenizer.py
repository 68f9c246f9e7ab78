"""The tokenizer of the small models: a byte-level BPE and its chat template.

Every byte has a token, so any text can be encoded and decoded. Every digit is a token of its own,
so models read numbers digit by digit. A question and its answer can be encoded apart from each
other, because a special token or a line break is always between them.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from dllm.tasks.suite import FAMILIES, Question, question

# Of the trained models: enough to make nearly every word of the questions one token. With 512, a
# name is one token inside a sentence, but two at the beginning of an answer. It is rounded up to a
# multiple of 64: the questions have a few merges fewer, and the last ids are never used.
VOCAB_SIZE = 832
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

# How many questions of each family the merges are learned from.
CORPUS_QUESTIONS = 1000


def make_tokenizer(
    corpus: Iterable[str],
    vocab_size: int,
    special: Sequence[str] = (),
    plain: Sequence[str] = (),
) -> Tokenizer:
    """A byte-level BPE of ``vocab_size`` tokens whose merges are learned from these texts.

    Args:
        special: more special tokens, behind ``SPECIAL_TOKENS``.
        plain: texts that are one token each, without being special; they have the last ids.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(plain),
        special_tokens=[
            AddedToken(text, special=True, normalized=False) for text in (*SPECIAL_TOKENS, *special)
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", TOKEN_ID["<bos>"])]
    )
    return tokenizer


def train_tokenizer(families: Iterable[str] = FAMILIES) -> Tokenizer:
    """The tokenizer of a model of these families, learned from training questions.

    Always the same.
    """
    texts = (
        text
        for drawn in corpus_questions(families)
        for text in ("user", "model", drawn.prompt, drawn.answer)
    )
    return make_tokenizer(weighted_pieces(texts), VOCAB_SIZE)


def corpus_questions(families: Iterable[str]) -> Iterator[Question]:
    """The training questions of each family that the merges are learned from."""
    for family in families:
        for index in range(CORPUS_QUESTIONS):
            yield question(family, "train", index)


def weighted_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Each piece of the texts (``SPLIT``) as often as the square root of its count.

    Otherwise words such as "lives", which are in every report many times, would leave too few
    merges for rare words.
    """
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    counts = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    return (piece for piece, count in sorted(counts.items()) for _ in range(math.isqrt(count)))


def encode_prompt(tokenizer: Tokenizer, question_text: str) -> list[int]:
    """The ids of one user message as the chat template writes it, up to where the answer starts."""
    text = f"<bos><|turn>user\n{question_text.strip()}<turn|>\n<|turn>model\n"
    return tokenizer.encode(text, add_special_tokens=False).ids


def encode_answer(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of an answer and the end-of-sequence token; they do not depend on the prompt.

    Raises:
        ValueError: the text begins with whitespace, which would merge with the end of the prompt.
    """
    if text[:1].isspace():
        raise ValueError(f"an answer must not begin with whitespace, got {text!r}")
    return [*tokenizer.encode(text, add_special_tokens=False).ids, TOKEN_ID["<eos>"]]


def save_tokenizer(
    tokenizer: Tokenizer, path: Path, model_max_length: int, chat_template: str = CHAT_TEMPLATE
) -> None:
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
    (path / "chat_template.jinja").write_text(chat_template)
