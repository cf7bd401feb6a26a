"""Which headers cross, in both directions: allow-lists, so that nothing new crosses by accident (RFC 9110, 7.6.1)."""

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping

from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping

# What vLLM can use of a client's headers.  Keys, cookies, hop-by-hop, identity and X-data-parallel-rank stay here.
_UP = ("Accept", "User-Agent", "traceparent", "tracestate")
_DOWN = frozenset({"content-type", "cache-control", "retry-after"})
_DOWN_PREFIXES = ("openai-", "x-")
# x- headers that steer something between us and the client (nginx reads X-Accel-*), or that are ours to say.
_KEPT_BACK = ("x-accel-", "x-forwarded-", "x-real-ip", "x-prefix-proxy-", "x-request-id", "x-powered-by", "x-sendfile")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Visible ASCII: whatever else stands in a value cannot be written again, or would split the header.
_VALUE = re.compile(r"[\t\x20-\x7e]{0,4096}")


def request_id(received: str | None) -> str:
    """Return the id that an exchange goes by: the client's if it is safe and at most 128 characters, else a new one.

    vLLM makes it part of its own id (`chatcmpl-<value>`), and it stands in logs: hence the alphabet.
    """
    return received if received is not None and _REQUEST_ID.fullmatch(received) else uuid.uuid4().hex


def upstream_headers(
    received: MultiMapping[str], *, request_id: str, api_key: str | None, content_type: str | None = "application/json"
) -> dict[str, str]:
    """Return what goes to vLLM of the headers that a client sent, with our own key and the exchange's id."""
    nominated = _nominated(received)
    headers = {
        name: value
        for name in _UP
        if name.lower() not in nominated and (value := received.get(name)) is not None and _VALUE.fullmatch(value)
    }
    # Compressed answers could not be looked at, and cost more than they save on one host.
    headers["Accept-Encoding"] = "identity"
    headers["X-Request-Id"] = request_id
    if content_type is not None:
        headers["Content-Type"] = content_type
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


def downstream_headers(answered: MultiMapping[str], *, request_id: str) -> CIMultiDict[str]:
    """Return what goes to the client of the headers that vLLM sent, with the exchange's id."""
    headers: CIMultiDict[str] = CIMultiDict()
    nominated = _nominated(answered)
    for name, value in _items(answered):
        low = name.lower()
        if low not in nominated and _goes_down(low) and _VALUE.fullmatch(value):
            headers.add(name, value)
    headers["X-Request-Id"] = request_id
    return headers


def _goes_down(name: str) -> bool:
    return name in _DOWN or (name.startswith(_DOWN_PREFIXES) and not name.startswith(_KEPT_BACK))


def _nominated(headers: MultiMapping[str]) -> frozenset[str]:
    """Return the names that Connection headers declare to end at this hop, in lower case."""
    values: Iterable[str] = headers.getall("Connection", ())
    return frozenset(name.strip().lower() for value in values for name in value.split(","))


def _items(headers: MultiMapping[str]) -> Iterator[tuple[str, str]]:
    yield from headers.items()


def as_headers(plain: Mapping[str, str]) -> CIMultiDictProxy[str]:
    """Return plain pairs as the case-blind mapping that the functions here take."""
    return CIMultiDictProxy(CIMultiDict(plain))
