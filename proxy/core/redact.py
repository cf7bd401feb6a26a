"""Text made unreadable that behaves as it did: equal words stay equal, lengths, lines and punctuation stay.

Words become other words of the same length under a key, numbers other numbers of the same kind (an hour stays an hour,
so that a clock is still seen as one).  What only machines write (tags, leads of templates) stays, for the rewriting
goes by it.
"""

import hashlib
import json
import re
import unicodedata
from functools import lru_cache

import orjson

from proxy.core.draft import DOCUMENT_LEADS
from proxy.core.identity import SYSTEM_LEADS, TASK_LEADS


def _listed(names: str) -> frozenset[str]:
    return frozenset(names.split())


_TAGS = "context|source|attached_files|memory_context|chat_history|think|tool_call|tool_response|user_query"
_LEADS = sorted(
    {*DOCUMENT_LEADS, *(lead for lead, _ in TASK_LEADS + SYSTEM_LEADS), "[CONVERSATION SUMMARY]"}, key=len, reverse=True
)
_MACHINE = "|".join(map(re.escape, _LEADS)) + rf"|</?(?:{_TAGS})\b"
_CLOCK = (
    r"|\b(?:now|current date|current time|local time|date and time|time|UTC|GMT|AM|PM|(?:Jan|Febr)uary"
    r"|March|April|May|June|July|August|(?:Sept|Nov|Dec)ember|October|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day)\b|现在|当前时间|現在"
)
_WORDS = (
    r"|(?P<escape>\\u[0-9a-fA-F]{4})|(?P<sign>\\[\"\\/bfnrt])|(?P<digits>\d+)|(?P<word>[^\W\d_]+)"
    r"|(?P<other>[^\s\x20-\x7e])"
)
_ANYWHERE = re.compile(f"(?P<machine>{_MACHINE}){_WORDS}")
_IN_SYSTEM = re.compile(f"(?P<machine>{_MACHINE}{_CLOCK}){_WORDS}")

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_KINDS = _listed(
    "text image_url input_text input_image input_audio function object string number integer boolean array null "
    "json_schema json_object auto none required low medium high"
)
_CLEAR = frozenset({"type", "tool_choice", "detail", "reasoning_effort"})
_KEYS = _listed(
    "messages role content type text image_url url detail name tool_calls tool_call_id id function arguments tools "
    "tool_choice parameters properties required items enum description default additionalProperties strict model "
    "stream stream_options include_usage temperature top_p max_tokens max_completion_tokens n seed stop user metadata "
    "response_format json_schema schema continue_final_message add_generation_prompt chat_template_kwargs "
    "enable_thinking cache_salt priority conversation_id session_id chat_id reasoning_effort reasoning_content "
    "reasoning presence_penalty frequency_penalty logprobs top_logprobs parallel_tool_calls min_p top_k "
    "repetition_penalty params documents prompt tool_ids files features variables model_item background_tasks"
)
_LOW, _HIGH = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WORDS_KEPT = 100_000


class Redactor:
    """Replaces text under a key; the same key makes the same of the same."""

    def __init__(self, key: bytes) -> None:
        """`key`: up to 64 bytes that nobody else knows."""
        self._key = key
        self._word = lru_cache(maxsize=_WORDS_KEPT)(self._make_word)
        self._order = lru_cache(maxsize=None)(self._make_order)

    def name(self, value: str) -> str:
        """Return a name for an identity: 16 hex digits, equal for equal ones."""
        return self._hash("name", value).hex()[:16]

    def text(self, text: str, *, system: bool = False) -> str:
        """Return the text with its words, numbers and foreign signs replaced; a `system` one keeps those of clocks."""
        return (_IN_SYSTEM if system else _ANYWHERE).sub(self._replaced, text)

    def body(self, raw: bytes, *, model: str = "") -> str:
        """Return a JSON body as text, redacted; `model` is a name that may stay.  Else only its length stays."""
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return "x" * len(raw)
        return json.dumps(self._value(value, "", model), ensure_ascii=False, separators=(",", ":"))

    def _value(self, value: object, key: str, model: str) -> object:
        if isinstance(value, str):
            return self._string(value, key, model)
        if isinstance(value, list):
            return [self._value(each, key, model) for each in value]
        if isinstance(value, dict):
            names: dict[object, str] = {"content": "system"} if value.get("role") in ("system", "developer") else {}
            names = {"text": "system"} if key == "system" else names
            return {self._field(k): self._value(v, names.get(k) or k, model) for k, v in value.items()}
        if isinstance(value, float | int) and not isinstance(value, bool) and key not in _KEYS:
            return 0
        return value

    def _field(self, name: str) -> str:
        return name if name in _KEYS else self.text(name)

    def _string(self, value: str, key: str, model: str) -> str:
        known = (key == "role" and value in _ROLES) or (key in _CLEAR and value in _KINDS)
        if known or (key == "model" and value == model):
            return value
        if key == "url" or value.startswith("data:"):
            return "data:," + self.name(value)
        return self.text(value, system=key == "system")

    def _replaced(self, found: "re.Match[str]") -> str:
        kind, text = found.lastgroup, found.group()
        if kind == "word":
            return self._word(text)
        if kind == "digits":
            return self._number(text)
        if kind == "escape":
            return f"\\u{0x4E00 + self._draw('escape', text, 0x5000):04x}"
        return "·" if kind == "other" and not _is_mark(text) else text

    def _make_word(self, word: str) -> str:
        if not word.isascii() and any(ord(sign) > 0x2E7F for sign in word):
            return self._signs(word)
        drawn = self._hash("word", word)
        while len(drawn) < len(word):
            drawn += self._hash("more", word + str(len(drawn)))
        return "".join((_HIGH if sign.isupper() else _LOW)[drawn[i] % 26] for i, sign in enumerate(word))

    def _signs(self, word: str) -> str:
        """Scripts without spaces, sign by sign with the one before: a longer run begins as the shorter one."""
        pairs = zip(" " + word, word, strict=False)
        return "".join(chr(0x4E00 + self._draw("sign", before + sign, 0x5000)) for before, sign in pairs)

    def _number(self, digits: str) -> str:
        if digits.isascii() and len(digits) == 4 and digits[:2] in ("19", "20"):
            return digits[:2] + self._two(digits[2:])  # a year, of the same century
        if digits.isascii() and len(digits) == 2:
            return self._two(digits)
        if digits.isascii() and len(digits) == 1:
            return str(self._within(int(digits), 1, 10)) if digits != "0" else digits
        drawn = self._hash("digits", digits)
        while len(drawn) < len(digits):
            drawn += self._hash("more", digits + str(len(drawn)))
        return "".join(str(drawn[i] % 10) for i in range(len(digits)))

    def _two(self, digits: str) -> str:
        value = int(digits)
        low, high = next((a, b) for a, b in ((0, 1), (1, 13), (13, 24), (24, 29), (29, 60), (60, 100)) if value < b)
        return f"{self._within(value, low, high):02d}"

    def _within(self, value: int, low: int, high: int) -> int:
        """Return another number of low to high - 1: all of them change places under the key."""
        return self._order(low, high)[value - low]

    def _make_order(self, low: int, high: int) -> list[int]:
        return sorted(range(low, high), key=lambda each: self._hash("number", f"{low}-{high}:{each}"))

    def _draw(self, kind: str, text: str, below: int) -> int:
        return int.from_bytes(self._hash(kind, text)[:8]) % below

    def _hash(self, kind: str, text: str) -> bytes:
        raw = f"{kind}\0{text}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(raw, key=self._key[:64], digest_size=32).digest()


def _is_mark(sign: str) -> bool:
    """Punctuation of other scripts shapes a text as ASCII's does."""
    return unicodedata.category(sign)[0] == "P"
