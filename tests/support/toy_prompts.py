"""Tokens of the small models, and prompts as token ids, without a chat template."""

from tokenizers import Tokenizer

# Of the small models' tokenizers: byte-level BPEs with a token a digit. A token's id is its place,
# and the first five are as in the released tokenizer.
SPECIAL_TOKENS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
    *("<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>"),
)
TOKEN_ID = {token: index for index, token in enumerate(SPECIAL_TOKENS)}


def encode_prompt(tokenizer: Tokenizer, question_text: str) -> list[int]:
    """The ids of one user message as the chat template writes it, up to where the answer starts."""
    text = f"<bos><|turn>user\n{question_text.strip()}<turn|>\n<|turn>model\n"
    return tokenizer.encode(text, add_special_tokens=False).ids
