"""One request of the bench: sent as Open WebUI sends it, measured by our clock and by vLLM's usage."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import orjson

from proxy.bench.scenarios import Ask
from proxy.core.meter import Meter

_CONNECT_SECONDS = 10
_SILENT_SECONDS = 300
_SMALL_ANSWER_SECONDS = 15
_SHOWN_CHARACTERS = 200


class Unusable(Exception):
    """A server that cannot be measured; the text says why and what to do, in one sentence."""


@dataclass(frozen=True, slots=True)
class Way:
    """One of the two ways: its name, where it leads, with which key, and what its requests carry besides."""

    name: str
    url: str  # without /v1
    key: str | None
    extra: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request cost.  Times in seconds from sending it; None and 0 where it failed."""

    scenario: str
    way: str
    turn: int
    task: str
    first_token_seconds: float | None
    prompt_tokens: int
    cached_tokens: int | None  # None where the server does not tell
    generated_tokens: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is asked, and its context in tokens where the server tells."""

    name: str
    context_tokens: int | None


def open_session() -> aiohttp.ClientSession:
    """Make the connections; to be closed."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS)
    # vLLM drops idle connections after five seconds: ours are dropped before, so that none breaks in our hands.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3), timeout=timeout)


async def find_model(session: aiohttp.ClientSession, way: Way, wanted: str | None) -> Model:
    """Return the wanted model of a server, or its first.  Raises Unusable."""
    timeout = aiohttp.ClientTimeout(total=_SMALL_ANSWER_SECONDS)
    try:
        async with session.get(f"{way.url}/v1/models", headers=_headers(way), timeout=timeout) as answer:
            status, raw = answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        raise Unusable(f"Nothing answers at {way.url}: is it running, and is this its address?") from None
    if status == 401:
        option = "--key" if way.name == "proxied" else "PREFIX_PROXY_UPSTREAM_API_KEY"
        raise Unusable(f"{way.url} asks for a key: give it by {option}.")
    models = _models(raw) if status == 200 else []
    found = next((each for each in models if wanted in (None, each.get("id"))), None)
    if found is None:
        why = f"has no model {wanted}" if models else f"has no list of models (status {status})"
        raise Unusable(f"{way.url} {why}.")
    length = found.get("max_model_len")
    return Model(str(found.get("id")), length if isinstance(length, int) else None)


def _models(raw: bytes) -> list[Mapping[str, object]]:
    try:
        data = orjson.loads(raw)["data"]
    except (ValueError, KeyError, TypeError):
        return []
    return [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []


def body_of(ask: Ask, way: Way, model: str, *, max_tokens: int, whole: bool) -> bytes:
    """Return the body of a request; `whole`: the answer is to have all its tokens, whatever the model wants."""
    body: dict[str, object] = {"stream": not ask.task, "model": model}
    if not ask.task:
        body["stream_options"] = {"include_usage": True}
    body |= {"messages": ask.messages, "max_tokens": max_tokens, "temperature": 0, **way.extra}
    if ask.tools:
        body["tools"] = ask.tools
    if whole:
        body["ignore_eos"] = True
    return orjson.dumps(body)


async def send(
    session: aiohttp.ClientSession, way: Way, scenario: str, ask: Ask, body: bytes, headers: Mapping[str, str]
) -> tuple[Sample, str]:
    """Send one request, read its answer to the end; return what it cost, and the text.  A failure is in the sample."""
    meter, failure, begun = Meter(), "", time.perf_counter()
    try:
        async with session.post(
            f"{way.url}/v1/chat/completions", data=body, headers={**_headers(way), **headers}
        ) as answer:
            if answer.status != 200:
                failure = f"status {answer.status}: {_message(await answer.read())}"
            elif ask.task:
                meter.feed_json(await answer.read(), time.perf_counter() - begun)
            else:
                async for chunk in answer.content.iter_any():
                    meter.feed(chunk, time.perf_counter() - begun)
    except (aiohttp.ClientError, TimeoutError) as error:
        failure = f"the connection broke ({type(error).__name__})"
    if not failure and (meter.error or not meter.done):
        failure = "the answer broke off"
    reply, usage = meter.reply(), meter.usage
    # A model may end without a word; the end is then the first that is seen of it.
    first = meter.first_token if meter.first_token is not None else time.perf_counter() - begun
    return Sample(
        scenario,
        way.name,
        ask.turn,
        ask.task,
        None if failure else first,
        usage.prompt_tokens if usage else 0,
        usage.cached_tokens if usage else None,
        usage.completion_tokens if usage else 0,
        failure,
    ), reply.content if reply else ""


def _headers(way: Way) -> Mapping[str, str]:
    authorization = {"Authorization": f"Bearer {way.key}"} if way.key else {}
    return {"Content-Type": "application/json", **authorization}


def _message(raw: bytes) -> str:
    """Return the sentence in an error body, bounded and printable."""
    try:
        error = orjson.loads(raw)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = raw[:_SHOWN_CHARACTERS].decode(errors="replace")
    return "".join(sign if sign.isprintable() else " " for sign in text)[:_SHOWN_CHARACTERS]
