"""TokenizerGrammars: the table of a grammar for the tokens of one model.

A special token (``<eos>``, ``<|turn>``) is no text: a JSON string must not hold one, though its
name could be spelled there. Only the text of a structural tag may name special tokens, for instance
those around a tool call; where a tag does, the token may stand for its name.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dllm.grammar.children import Children
from dllm.grammar.compile import Compiler, Spec
from dllm.grammar.table import Table
from dllm.grammar.vocabulary import Vocabulary

# Where a structural tag has texts, in either of xgrammar's forms.
SPOKEN = ("begin", "end", "triggers", "value", "separator", "pattern", "grammar")
KEPT_PACKED = 64  # tables; some hundred kilobytes each for a large vocabulary


class TokenizerGrammars:
    """For any number of threads.

    Args:
        tokenizer: of Hugging Face.
        vocab_size: of the model; at least the tokenizer's.
        folder: for files of tables; None for no files.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, folder: Path | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._folder = folder
        self._children = Children()
        self._lock = threading.Lock()
        self._packed: OrderedDict[tuple[Spec, frozenset[int]], bytes] = OrderedDict()

    def known(self, spec: Spec, stops: Collection[int]) -> bytes | None:
        """What ``packed`` has returned for these arguments, if it is still kept; at once."""
        key = spec, frozenset(stops)
        with self._lock:
            if key in self._packed:
                self._packed.move_to_end(key)
            return self._packed.get(key)

    def packed(self, spec: Spec, stops: Collection[int]) -> bytes:
        """``table`` as bytes (``Table.to_bytes``)."""
        if packed := self.known(spec, stops):
            return packed
        packed = self.table(spec, stops).to_bytes()
        with self._lock:
            self._packed[spec, frozenset(stops)] = packed
            if len(self._packed) > KEPT_PACKED:
                self._packed.popitem(last=False)
        return packed

    def table(self, spec: Spec, stops: Collection[int]) -> Table:
        """The table of a grammar, in whose texts the tokens ``stops`` do not come.

        Raises:
            Unsupported: the grammar is refused.
        """
        is_tag = spec.kind == "structural_tag"
        with self._lock:
            compiler = self._of_tags if is_tag else self._of_texts
        spoken = "\n".join(_spoken(json.loads(spec.text))) if is_tag else ""
        unnamed = [token for token, name in self._names.items() if name not in spoken]
        return compiler.table(spec).without([*stops, *unnamed])

    @cached_property
    def _names(self) -> dict[int, str]:
        """The special tokens."""
        added = self._tokenizer.added_tokens_decoder.items()
        names = {token: str(entry) for token, entry in added if entry.special}
        of_ids = self._tokenizer.convert_ids_to_tokens(self._tokenizer.all_special_ids)
        return names | dict(zip(self._tokenizer.all_special_ids, of_ids, strict=True))

    @cached_property
    def _words(self) -> list[bytes]:
        import xgrammar  # here: it imports PyTorch

        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocab_size)
        return list(info.decoded_vocab)

    @cached_property
    def _of_tags(self) -> Compiler:
        return Compiler(Vocabulary(self._words), self._folder, self._children)

    @cached_property
    def _of_texts(self) -> Compiler:
        names = self._names
        words = [b"" if token in names else word for token, word in enumerate(self._words)]
        return Compiler(Vocabulary(words), self._folder, self._children)


def _spoken(tag: Any, key: str = "") -> Iterator[str]:
    """The texts that a structural tag has answers written with; no names or descriptions."""
    if isinstance(tag, str) and key in SPOKEN:
        yield tag
    elif isinstance(tag, list):
        for one in tag:
            yield from _spoken(one, key)
    elif isinstance(tag, Mapping):
        for name, value in tag.items():
            if name not in ("json_schema", "schema"):
                yield from _spoken(value, name)
