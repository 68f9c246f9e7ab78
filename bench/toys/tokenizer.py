"""The special tokens of the small models, which all of their tokenizers have at the same ids.

A tokenizer of theirs is a byte-level BPE: any text can be encoded and decoded. Every digit is a
token of its own, so that models read numbers digit by digit.
"""

from pathlib import Path

from tokenizers import Tokenizer

# A token's id is its position in this list. The first five are as in the released tokenizer.
SPECIAL_TOKENS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
    *("<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>"),
)
TOKEN_ID = {token: index for index, token in enumerate(SPECIAL_TOKENS)}


def knows_questions(checkpoint: Path) -> bool:
    """Whether a checkpoint is one of our small models, judged by its tokenizer."""
    path = checkpoint / "tokenizer.json"
    if not path.exists():
        return False
    tokenizer = Tokenizer.from_file(str(path))
    return all(tokenizer.token_to_id(token) == index for token, index in TOKEN_ID.items())
