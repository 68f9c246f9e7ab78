"""Prompts of the small models as token ids, without a chat template."""

from tokenizers import Tokenizer


def encode_prompt(tokenizer: Tokenizer, question_text: str) -> list[int]:
    """The ids of one user message as the chat template writes it, up to where the answer starts."""
    text = f"<bos><|turn>user\n{question_text.strip()}<turn|>\n<|turn>model\n"
    return tokenizer.encode(text, add_special_tokens=False).ids
