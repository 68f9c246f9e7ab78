"""A tokenizer with a token for each character, as vLLM's API server uses one."""


class Letters:
    """Notes the lengths of texts.

    Args:
        max_chars_per_token: as vLLM says it of a tokenizer.
    """

    def __init__(self, max_chars_per_token: int = 1) -> None:
        self.max_chars_per_token = max_chars_per_token
        self.lengths: list[int] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.lengths.append(len(text))
        return [ord(letter) for letter in text]
