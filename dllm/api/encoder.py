"""Texts of a request's own fields become tokens; those that cannot fit are refused before that.

The API server serves nobody else while it tokenizes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dllm.settings.request import refuse


@dataclass(frozen=True)
class Encoder:
    """A tokenizer for the texts of a request's fields.

    Attributes:
        encode: gives the ids of a text, without special tokens.
        chars_per_token: the most characters that one token stands for.
    """

    encode: Callable[[str], list[int]]
    chars_per_token: int

    @classmethod
    def of(cls, tokenizer: Any) -> "Encoder":
        """With a tokenizer of vLLM."""

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        return cls(encode, tokenizer.max_chars_per_token)

    def check_length(self, field: str, num_chars: int, num_tokens: int) -> None:
        """Refuse more characters than ``num_tokens`` tokens can stand for.

        Raises:
            VLLMValidationError: there are more; nothing was tokenized.
        """
        longest = num_tokens * self.chars_per_token
        if num_chars > longest:
            refuse(
                field,
                f"{field} has {num_chars} characters of text; allowed: at most {longest}, more do "
                f"not fit {num_tokens} tokens. Send a shorter text.",
            )
