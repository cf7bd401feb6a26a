"""The shape of a text without its words: every letter as x, every digit as 0."""

import unicodedata

AROUND_CHARACTERS = 40
"""What is shown of a text on each side of the place where it differs."""

_KEPT = "PZ"


def masked(text: str) -> str:
    """Return the text with letters as x and digits as 0; white space and punctuation stay, all else is x."""
    return "".join(map(_sign, text))


def around(text: str, at: int) -> str:
    """Return the masked text around character `at`, with a dot in front or behind where more of it is left out."""
    begin, end = max(at - AROUND_CHARACTERS, 0), at + AROUND_CHARACTERS
    return ("…" if begin else "") + masked(text[begin:end]) + ("…" if end < len(text) else "")


def _sign(sign: str) -> str:
    if sign.isspace():
        return sign
    kind = unicodedata.category(sign)[0]
    if kind == "N":
        return "0"
    return sign if kind in _KEPT or sign in "<>=+|`^~$" else "x"
