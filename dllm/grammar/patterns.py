"""Regular expressions of schemas and requests: what is refused, and how one does without ``<``.

xgrammar 0.2.8 reads them as JavaScript does (``[^]`` is any character), and leaves out what looks
around.
"""

import re

from dllm.grammar.rules import Unsupported

# xgrammar reads further digits, too: \x03c as \x3c. In a class \d and \w give it such digits: it
# writes them as 0-9 and a-z.
NUMBERED = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})(?![0-9a-fA-F]|\\[dw])"
# Linear in time: what begins with "[" is always one part, also where nothing closes it.
PART = re.compile(rf"\[(?:\\.|[^\]\\])*\]?|{NUMBERED}|\\.|.", flags=re.DOTALL)
BETWEEN_CHARACTERS = {r"\b", r"\B", r"\A", r"\Z", r"\z"}

# What xgrammar reads in another way than everybody: \x041 is no "\x04" and "1" to it.
LONG_NUMBER = re.compile(r"(?:[^\\]|\\(?!x[0-9a-fA-F]{3}).)*\\x[0-9a-fA-F]{3}", flags=re.DOTALL)

ESCAPED = rf"{NUMBERED}|\\[fnrtv]|\\[^a-zA-Z0-9]"
IN_CLASS = rf"[^\\\]\-]|{ESCAPED}"
ITEM = rf"\\[dswDSW]|({IN_CLASS})(?:-({IN_CLASS}))?"
# No "-" beside "\w": xgrammar takes it for a range that begins or ends with a letter.
CLASS = rf"\[\^?-?(?:{ITEM})*-?\]"
WITHOUT = {".": "[^<]", r"\D": r"[^<\d]", r"\S": r"[^<\s]", r"\W": r"[^<\w]"}


def check_pattern(pattern: str) -> None:
    """Refuse what xgrammar would leave out or misread.

    Raises:
        Unsupported: anchors inside, groups that look around, a digit behind ``\\x00``.
    """
    if LONG_NUMBER.match(pattern):
        raise Unsupported(
            f"The pattern {pattern[:80]!r} has a hexadecimal digit behind '\\x' and two of them; "
            "allowed: other characters. Write '\\u00' in the place of '\\x'."
        )
    parts = PART.findall(pattern)
    bare = "".join(part if len(part) == 1 else "x" for part in parts)
    if re.search(r"\(\?(?!:)", bare) or BETWEEN_CHARACTERS & set(parts):
        raise Unsupported(
            f"The pattern {pattern[:80]!r} looks around or has flags; allowed: groups with '(' and "
            "'(?:'. Write it without."
        )
    if "^" in bare[1:] or "$" in bare[:-1]:
        raise Unsupported(
            f"The pattern {pattern[:80]!r} has '^' or '$' inside; allowed: '^' at the start and "
            "'$' at the end. Leave the others out."
        )


def without_less_than(pattern: str) -> str:
    """A regular expression of the same texts but those with a ``<``; without anchors.

    Raises:
        Unsupported: no text is without ``<``, or xgrammar may read a part in another way than we.
    """
    check_pattern(pattern)
    parts = PART.findall(pattern)
    if parts[:1] == ["^"]:
        parts = parts[1:]
    if parts[-1:] == ["$"]:
        parts = parts[:-1]
    return "".join(_part(part) for part in parts)


def _part(part: str) -> str:
    if part in WITHOUT:
        return WITHOUT[part]
    if part[0] == "[":
        return _class(part)
    if part == "<" or (re.fullmatch(ESCAPED, part) and _character(part) == "<"):
        raise _has_mark(part)
    if part[0] == "\\" and not re.fullmatch(rf"{ESCAPED}|\\[dsw]", part):
        raise Unsupported(
            f"A pattern has {part!r}, of which it is not known what it stands for. Write the "
            "character itself."
        )
    return part


def _class(text: str) -> str:
    if not re.fullmatch(CLASS, text):
        raise Unsupported(
            f"A pattern has the class {text[:80]!r}; allowed: characters, ranges, and '-' at the "
            "start or the end. Write it so."
        )
    if text.startswith("[^"):
        # A "-" at the start would make a range.
        return "[^<" + ("\\" if text[2] == "-" else "") + text[2:]
    return "[" + re.sub(ITEM, _item, text[1:-1]) + "]"


def _item(found: re.Match[str]) -> str:
    """A character, a range or an escape in a class."""
    low, high = found[1], found[2] or found[1]
    if low is None:
        if found[0] in WITHOUT:
            raise Unsupported(
                f"A pattern has {found[0]!r} in a class. Write '.' for any character, or a class "
                "with '^'."
            )
        return found[0]
    first, last = _character(low), _character(high)
    if not first <= "<" <= last:
        return found[0]
    below = f"{low}-;" if first < "<" else ""
    above = f"=-{high}" if last > "<" else ""
    if not below + above:
        raise _has_mark(found[0])
    return below + above


def _character(text: str) -> str:
    """What a character or an escape stands for; any control character for those with a name."""
    if len(text) > 2:
        return chr(int(text[2:], 16))
    return "\n" if text[0] == "\\" and text[1:] in tuple("fnrtv") else text[-1]


def _has_mark(part: str) -> Unsupported:
    return Unsupported(
        f"A pattern of a tool has {part!r}: a '<' begins the mark that ends a string in Gemma's "
        "calls. Leave it out."
    )
