"""What the tokens of a Hugging Face tokenizer stand for."""

from typing import Any

from dllm.grammar.compile import Tokens


def tokens_of(tokenizer: Any, vocab_size: int) -> Tokens:
    """The bytes of every token, and the names of the special ones; a second for 262,144.

    Args:
        tokenizer: of Hugging Face.
        vocab_size: of the model; at least the tokenizer's.
    """
    import xgrammar  # here: it imports PyTorch

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    added = tokenizer.added_tokens_decoder.items()
    names = {token: str(entry) for token, entry in added if entry.special}
    of_ids = tokenizer.convert_ids_to_tokens(tokenizer.all_special_ids)
    names |= dict(zip(tokenizer.all_special_ids, of_ids, strict=True))
    return Tokens(list(info.decoded_vocab), names)
