"""From what vLLM answered in one piece to what a client can read: JSON, and errors always with a sentence."""

from collections.abc import Mapping
from dataclasses import dataclass

import orjson
from multidict import CIMultiDict

from proxy.core.reject import error_body
from proxy.core.sse import DONE, EventScanner

_SHORT = 500  # characters of a foreign error's sentence


@dataclass(frozen=True, slots=True)
class Plain:
    """A whole answer: `failure` is a kind of proxy.metrics.UPSTREAM_ERRORS, None for a good answer."""

    status: int
    body: bytes
    failure: str | None = None
    own: bool = False  # written here, in place of what came


def plain_answer(status: int, content_type: str, body: bytes) -> Plain:
    """Return what the client gets: JSON of vLLM as it came, any error in OpenAI's shape.

    vLLM has others too: `{"detail": ...}` for a route that its model lacks, `{"error": "Unauthorized"}` for a key.
    """
    if status < 200 or 300 <= status < 400:
        return _own(502, "The model server answered with a redirect. Its address may be wrong.", "other")
    if status < 300:
        if _is_json(content_type, body):
            return Plain(status, body)
        return _own(502, "The model server's answer is not JSON.", "not_json")
    kind = "status_4xx" if status < 500 else "status_5xx"
    if content_type != "text/event-stream" and _has_sentence(body):
        return Plain(status, body, kind)
    return _own(status, _sentence(body) or f"The model server answered with status {status} and no message.", kind)


def empty_answer(
    model: str, rest: Mapping[str, object], *, chat: bool, id: str, created: int
) -> tuple[CIMultiDict[str], Plain | None, bytes]:  # fmt: skip
    """Return headers, whole answer or stream of a completion that says nothing, in vLLM's shape.

    SDKs take it for what it is and do not ask again; Open WebUI shows no suggestion.
    """
    headers = CIMultiDict({"x-should-retry": "false"})
    usage = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0}
    head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{id}", "created": created, "model": model}
    streams = rest.get("stream") is True
    kind = ("chat.completion.chunk" if streams else "chat.completion") if chat else "text_completion"
    message = {"role": "assistant", "content": ""}
    said: dict[str, object] = {"delta" if streams else "message": message} if chat else {"text": ""}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    body = {**head, "object": kind, "choices": [choice]}
    if not streams:
        headers["Content-Type"] = "application/json"
        return headers, Plain(200, orjson.dumps({**body, "usage": usage})), b""
    headers["Content-Type"] = "text/event-stream; charset=utf-8"
    events = [body]
    options = rest.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage") is True:
        events.append({**head, "object": kind, "choices": [], "usage": usage})
    return headers, None, b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + DONE


def _own(status: int, message: str, failure: str) -> Plain:
    return Plain(status, orjson.dumps(error_body(message, kind="server_error", code=status)), failure, own=True)


def _is_json(content_type: str, body: bytes) -> bool:
    # A body of the right type is not parsed for this: numbers that orjson refuses may be fine for the client.
    first = body.lstrip()[:1]
    return first in (b"{", b"[") and (content_type.endswith("json") or _is_object(body))


def _is_object(body: bytes) -> bool:
    return isinstance(_load(body), dict)


def _has_sentence(body: bytes) -> bool:
    told = _load(body)
    error = told.get("error") if isinstance(told, dict) else None
    return isinstance(error, dict) and bool(error.get("message"))


def _sentence(body: bytes) -> str | None:
    """Return what an error says: in JSON, or in the first event of a stream that says something."""
    for data in (body, *EventScanner().feed(body + b"\n\n")):
        told = _load(data)
        if not isinstance(told, dict):
            continue
        error = told.get("error", told)
        message = error if isinstance(error, str) else None
        if isinstance(error, dict):
            message = next((error[name] for name in ("message", "detail") if isinstance(error.get(name), str)), None)
        if message and message.strip():
            return message[:_SHORT]
    return None


def _load(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except ValueError:
        return None
