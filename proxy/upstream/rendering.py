"""The prompts that a running vLLM makes of messages, through /tokenize: its own template, its own tokenizer."""

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.core.template_cases import TOOLS, Ask
from proxy.core.template_check import Refused, Rendering
from proxy.upstream.vllm import TOKENIZE_SECONDS, Fetch

_ANSWER_BYTES = 16 * 1024 * 1024
_SPACE = "▁"  # how tokenizers of the sentencepiece kind write a space


class NoAnswer(Exception):
    """vLLM does not answer, or not as vLLM; the text says so in one sentence."""


class UpstreamRenderer:
    """Asks vLLM for prompts."""

    def __init__(self, fetch: Fetch, model: str | None = None) -> None:
        self._fetch = fetch
        self._model = model

    async def render(self, ask: Ask) -> Rendering | Refused:
        """Return the prompt, or why vLLM would not make one.  Raises NoAnswer."""
        answer = await self._fetch(
            "POST", "/tokenize", body=self._body(ask), seconds=TOKENIZE_SECONDS, limit_bytes=_ANSWER_BYTES
        )
        if answer is None:
            raise NoAnswer("vLLM cannot be reached at this URL.")
        status, _, raw = answer
        try:
            found = orjson.loads(raw)
        except ValueError:
            found = None
        if status in (401, 403, 404):
            raise NoAnswer(f"/tokenize answers {status}: {_message(found)}.")
        if status in (400, 500) and isinstance(found, dict):  # faults of a template come as either
            return Refused(_message(found))
        if status != 200 or not isinstance(found, dict):
            raise NoAnswer(f"/tokenize answers {status}, which is not what vLLM does.")
        return _rendering(found)

    def _body(self, ask: Ask) -> bytes:
        body: dict[str, object] = {
            "messages": ask.messages,
            "add_generation_prompt": ask.generation,
            "continue_final_message": ask.continues,
            "return_token_strs": True,
        }
        body |= {"model": self._model} if self._model else {}
        body |= {"tools": TOOLS} if ask.tools else {}
        body |= {"chat_template_kwargs": ask.kwargs} if ask.kwargs else {}
        return orjson.dumps(body)


def _message(found: object) -> str:
    error: Any = found.get("error") if isinstance(found, dict) else None
    told = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(told or "no reason given").split())[:200].rstrip(".")


def _rendering(found: Mapping[str, Any]) -> Rendering:
    tokens, strings = found.get("tokens"), found.get("token_strs")
    if not isinstance(tokens, list) or not isinstance(strings, list) or len(tokens) != len(strings):
        raise NoAnswer("/tokenize gives no token strings; vLLM 0.10 or newer is needed.")
    text, starts = text_of_tokens([str(each) for each in strings])
    return Rendering(text, tuple(tokens), starts)


def text_of_tokens(strings: list[str]) -> tuple[str, tuple[int, ...]]:
    """Return the text of a tokenizer's own strings and where in it each token begins, in characters.

    A letter that spans tokens counts to the first of them.
    """
    pieced = any(_SPACE in each for each in strings)
    known = _byte_of_sign()
    raw = bytearray()
    ends = []
    for each in strings:
        raw += _pieced_bytes(each) if pieced else _level_bytes(each, known)
        ends.append(len(raw))
    text = raw.decode(errors="replace")
    whole = bytes(raw)
    starts = tuple(len(whole[:end].decode(errors="ignore")) for end in [0, *ends][: len(strings)])
    return text, starts


def _level_bytes(string: str, known: Mapping[str, int]) -> bytes:
    """Byte-level tokenizers write each byte as one printable sign; added tokens stand in plain text."""
    if all(sign in known for sign in string):
        return bytes(known[sign] for sign in string)
    return string.encode()


def _pieced_bytes(string: str) -> bytes:
    if len(string) == 6 and string.startswith("<0x") and string.endswith(">"):
        return bytes.fromhex(string[3:5])
    return string.replace(_SPACE, " ").encode()


def _byte_of_sign() -> Mapping[str, int]:
    """Return GPT-2's table: bytes that print stand for themselves, the others for signs from 256 on, in order."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
