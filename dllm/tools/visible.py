"""Text of a model as a terminal or a picture may show it.

A control character may do anything to a terminal: clear it, write to the clipboard. XML does not
allow most of them.
"""

import unicodedata

# Control characters, halves of surrogate pairs, what Unicode does not define, breaks of lines.
HIDDEN = ("Cc", "Cs", "Cn", "Zl", "Zp")
REPLACEMENT = "�"


def visible(text: str, kept: str = "") -> str:
    """``text`` with a replacement for each hidden character that is not in ``kept``."""
    return "".join(
        REPLACEMENT if unicodedata.category(char) in HIDDEN and char not in kept else char
        for char in text
    )
