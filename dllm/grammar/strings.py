"""Strings of a lowered schema: patterns, lengths and formats."""

import math

from dllm.grammar.alternatives import Flat, has_no_text
from dllm.grammar.nodes import Text
from dllm.grammar.pattern_edges import held
from dllm.grammar.patterns import ANYTHING, Alphabet, Clause
from dllm.grammar.references import refuse

DAY31, DAY30 = "(?:0[1-9]|[12][0-9]|3[01])", "(?:0[1-9]|[12][0-9]|30)"
DATE = (
    f"[0-9]{{3}}[1-9]-(?:(?:0[13578]|1[02])-{DAY31}|(?:0[469]|11)-{DAY30}"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{HOUR_MINUTE})"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
LABEL = "[a-z0-9](?:[a-z0-9-]{0,20}[a-z0-9])?"
HOST = rf"{LABEL}(?:\.{LABEL}){{0,3}}\.[a-z]{{2,10}}"
NAME = r"[A-Za-z0-9_+-]+"
HEX = "[0-9a-fA-F]"
GROUP = f"{HEX}{{1,4}}"
POINTER = r"(?:/(?:[!#-.0-\[\]-}]|~[01])*)*"
UNRESERVED = "[A-Za-z0-9._~-]"
# RFC 3986, without users, literals of addresses, and parts that may be empty.
NO_COLON = r"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
HOST_PORT = r"[A-Za-z0-9.-]+(?::[0-9]{1,4})?"
BEHIND = rf"(?:\?(?:{PCHAR}|[/?])*)?(?:#(?:{PCHAR}|[/?])*)?"
URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{HOST_PORT}|{PCHAR}+|/{PCHAR}+)(?:/{PCHAR}*)*{BEHIND}"
REFERENCE = rf"(?:(?:{NO_COLON}+|/{PCHAR}+)(?:/{PCHAR}*)*|/)?{BEHIND}"
# RFC 3339, appendix A.
CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
# Some of the texts of each format: those that everybody calls valid.
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "ipv4": rf"{BYTE}(?:\.{BYTE}){{3}}",
    "ipv6": (
        f"(?:{GROUP}:){{7}}{GROUP}|(?:{GROUP}:){{1,7}}:|(?:{GROUP}:){{1,6}}:{GROUP}"
        f"|::(?:{GROUP}(?::{GROUP}){{0,5}})?"
    ),
    "hostname": HOST,
    "email": rf"{NAME}(?:\.{NAME})*@{HOST}",
    "uuid": f"{HEX}{{8}}(?:-{HEX}{{4}}){{3}}-{HEX}{{12}}",
    "json-pointer": POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{POINTER})",
    "duration": f"P(?:[0-9]+W|{DAYS}(?:{CLOCK})?|{CLOCK})",
    "uri": URI,
    "uri-reference": f"(?:{URI}|{REFERENCE})",
    "uri-template": rf"https?://{LABEL}(?:\.{LABEL})*(?:/(?:{UNRESERVED}|\{{[A-Za-z0-9_]+\}})*)*",
}
FORMATS |= {
    f"uuid{version}": f"{HEX}{{8}}-{HEX}{{4}}-{version}{HEX}{{3}}-[89abAB]{HEX}{{3}}-{HEX}{{12}}"
    for version in range(1, 9)
}
FORMATS |= {"iri": FORMATS["uri"], "iri-reference": FORMATS["uri-reference"]}
ATOM = r"(?:[A-Za-z0-9 _:;=@%,/-]|\\[dswDSW.]|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_. ])+\]|\.)[*+?]?"
FORMATS["regex"] = rf"\^?(?:{ATOM}|\((?:{ATOM})+(?:\|(?:{ATOM})+)*\)[*+?]?)*\$?"
# pydantic's, of which no standard says more: any text without control characters.
FORMATS |= dict.fromkeys(("path", "file-path", "directory-path"), r"[^\x00-\x1f\x7f]+")
# Beside a length: an address of at most 337 characters.
SHORT_URI = r"https?://(?:[a-z0-9]{1,20}\.){1,3}[a-z]{2,10}(?:/[A-Za-z0-9._~/-]{0,255})?"
MOST_LENGTH = 1 << 20  # a larger one limits nothing: no answer is as long


def lowered_string(flat: Flat, alphabet: Alphabet, is_whole: bool = True) -> Text | None:
    """The node of an alternative's strings (``alternatives``); None if there are none."""
    fewest = max(math.ceil(flat.get("minLength", 0)), 0)
    most = flat.get("maxLength", math.inf)
    most = math.floor(most) if most < MOST_LENGTH else math.inf
    patterns, form, path = flat.get("pattern", ()), flat.get("format"), flat["path"]
    # A single one is of the whole text, also without anchors: answers are some of those that match.
    is_whole &= len(patterns) == 1 and patterns[0][1] and form not in FORMATS
    parts = [Clause(pattern, is_there, is_whole) for pattern, is_there in patterns]
    if form in ("idn-email", "idn-hostname"):  # of which ASCII would be next to nothing
        refuse("format", path, f"answers cannot be held to {form!r}")
    if form in FORMATS:
        is_short = form == "uri" and not patterns and (fewest, most) != (0, math.inf)
        parts.insert(0, Clause(SHORT_URI if is_short else FORMATS[form]))
    if not parts and (fewest, most) == (0, math.inf):
        return Text()
    spelled = held(parts or [Clause(ANYTHING)], alphabet, fewest, most)
    if spelled is not None:
        return Text(spelled)
    if has_no_text(flat):
        return None
    keyword = "format" if "format" in flat else "pattern"
    refuse(keyword, path, "beside what else is asked no text that can be written is of it")
