"""Asks a running vLLM for all that the checks judge: it generates single tokens, and computes two prompts twice."""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from proxy.chat_template import TemplateFailed
from proxy.config.groups import Upstream as Settings
from proxy.core.template_cases import TOOLS
from proxy.doctor.server import Server, Timed, cache_labels
from proxy.doctor.sockets import idle_seconds, is_beyond_loopback
from proxy.template_verdicts import check_upstream, fitting
from proxy.upstream.client import Upstream
from proxy.upstream.rendering import NoAnswer, UpstreamRenderer
from proxy.upstream.vllm import parse_models

WATCH_SECONDS = 8.0  # vLLM closes after 5; a proxy's pool keeps connections for 4
_QUICK_SECONDS, _SLOW_SECONDS, _GENERATE_SECONDS = 5.0, 30.0, 300.0
_POLICY = re.compile(rb"\bpolicy[\"']?\s*[=:]\s*[\"']?(fcfs|priority)\b")
_ANSWER_BYTES = 32 * 1024 * 1024
# A prompt that a CPU computes in seconds; where that is nothing, one that a GPU feels.
_FEW_TOKENS, _MANY_TOKENS = 500, 6000
_MANY_IF_BELOW_SECONDS = 0.5
_TOKENS_PER_WORD = 1.4
_WORDS = ("harbour", "river", "window", "garden", "winter", "bridge", "letter", "silver", "market", "pencil")
_ASK = {"role": "user", "content": "Say yes."}

Report = Callable[[str], None]
Answer = tuple[int, Any]
"""The status, 0 without an answer, and the JSON object, {} if it is none."""


async def look(
    settings: Settings, model: str | None, *, report: Report, watch_seconds: float = WATCH_SECONDS
) -> Server:
    """Return what is seen of the vLLM at `settings.url`; `report` is told what is being done."""
    upstream, keyless = Upstream(settings), Upstream(replace(settings, api_key=None))
    try:
        return await _Look(settings.url, upstream, keyless, report).all(model, watch_seconds)
    finally:
        await upstream.close()
        await keyless.close()


class _Look:
    def __init__(self, url: str, upstream: Upstream, keyless: Upstream, report: Report) -> None:
        self.url, self.upstream, self.keyless, self.report = url, upstream, keyless, report
        self.model = ""

    async def all(self, model: str | None, watch_seconds: float) -> Server:
        """Ask for everything, one thing after the other, while a socket is watched."""
        self.report("looking at vLLM")
        server = await self._first(model)
        if server.problem:
            return server
        watched, seen = await asyncio.gather(self._idle(watch_seconds), self._rest(server))
        return replace(seen, idle_seconds=watched[0], watched_seconds=watched[1])

    async def _first(self, model: str | None) -> Server:
        """Return the server with its models and version, or with the reason why it cannot be looked at."""
        status, raw = await self._raw(self.upstream, "GET", "/v1/models")
        bare = Server(self.url)
        if status == 0:
            return replace(bare, problem="vLLM cannot be reached at this address.")
        if status in (401, 403):
            return replace(bare, needs_key=True, problem="vLLM asks for a key, and takes none or another than this.")
        models = parse_models(raw) if status == 200 else None
        if models is None or not models.models:
            return replace(bare, problem=f"This is no vLLM: /v1/models answers {status}, without models.")
        self.model = model or next(iter(models.models))
        if self.model not in models.models:
            served = ", ".join(list(models.models)[:5])
            return replace(bare, problem=f"vLLM does not serve {self.model}; it serves {served}.")
        version = (await self._get("/version"))[1].get("version")
        if version is None and "status" in (await self._get("/ready"))[1]:
            return replace(bare, problem="This is the proxy: name the address of vLLM itself.")
        return replace(
            bare,
            model=self.model,
            max_model_len=models.max_model_len.get(self.model),
            version=version if isinstance(version, str) else None,
        )

    async def _rest(self, server: Server) -> Server:
        _, metrics = await self._raw(self.upstream, "GET", "/metrics")
        server = replace(server, cache=cache_labels(metrics.decode(errors="replace")))
        server = await self._doors(server)
        self.report("checking the chat template")
        server = await self._template(server)
        self.report("asking with tools")
        server = await self._tools(server)
        self.report("timing a prompt, new and once more")
        return await self._timed(server)

    async def _doors(self, server: Server) -> Server:
        needs_key = (await self._raw(self.keyless, "GET", "/v1/models"))[0] == 401
        asked = (("GET", "/metrics"), ("POST", "/tokenize"), ("POST", "/invocations"))
        # An empty object is refused as such where the door is open: nothing is computed.
        found = [
            path for method, path in asked if (await self._raw(self.keyless, method, path, b"{}"))[0] in (200, 400, 422)
        ]
        developer = (await self._get("/is_sleeping"))[0] == 200
        policy = await self._policy() if developer else None
        return replace(
            server,
            needs_key=needs_key,
            open_paths=tuple(found),
            developer_routes=developer,
            policy=policy,
            beyond_loopback=await is_beyond_loopback(self.url),
        )

    async def _policy(self) -> str | None:
        """Return how vLLM orders requests; only its developers' routes tell."""
        _, raw = await self._raw(self.upstream, "GET", "/server_info?config_format=json", seconds=_SLOW_SECONDS)
        found = _POLICY.search(raw)
        return found[1].decode() if found else None

    async def _template(self, server: Server) -> Server:
        try:
            checked = await check_upstream(UpstreamRenderer(self.upstream.fetch, self.model).render)
            return replace(server, template=checked, fitting=await asyncio.to_thread(fitting, checked.probed))
        except (NoAnswer, TemplateFailed):
            return server

    async def _tools(self, server: Server) -> Server:
        status, answer = await self._chat({"tools": TOOLS, "tool_choice": "auto"})
        refused = status == 400 and "tool" in str(answer.get("error") or answer)
        server = replace(server, tools_refused=refused if status in (200, 400) else None)
        if server.template is None or not server.template.traits.tools:
            return server
        without = _usage((await self._chat({}))[1], "prompt_tokens")
        with_none = _usage((await self._chat({"tools": TOOLS, "tool_choice": "none"}))[1], "prompt_tokens")
        left_out = None if without is None or with_none is None else with_none < without + 20
        return replace(server, tools_left_out=left_out)

    async def _timed(self, server: Server) -> Server:
        room = (server.max_model_len or 4096) // 2
        for tokens in (_FEW_TOKENS, _MANY_TOKENS):
            messages = [{"role": "user", "content": _long_text(min(tokens, room))}]
            cold, warm = await self._time(messages), await self._time(messages)
            if cold is None or warm is None:
                return server
            server = replace(server, cold=cold, warm=warm)
            if cold.seconds > _MANY_IF_BELOW_SECONDS or room < 2 * _FEW_TOKENS:
                return server
        return server

    async def _time(self, messages: Sequence[Mapping[str, str]]) -> Timed | None:
        begun = time.perf_counter()
        _, answer = await self._chat({"messages": messages})
        seconds = time.perf_counter() - begun
        prompt = _usage(answer, "prompt_tokens")
        if prompt is None:
            return None
        details = answer["usage"].get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        # Without its flag vLLM writes no details at all; older ones write none for a prompt that was new.
        return Timed(prompt, (cached or 0) if isinstance(details, dict) else None, seconds)

    async def _idle(self, watch_seconds: float) -> tuple[float | None, float]:
        try:
            return await idle_seconds(self.url, watch_seconds=watch_seconds), watch_seconds
        except (OSError, TimeoutError):
            return None, 0.0

    async def _chat(self, fields: Mapping[str, object]) -> Answer:
        body = {"model": self.model, "messages": [_ASK], "max_tokens": 1, "temperature": 0, **fields}
        raw = await self._raw(self.upstream, "POST", "/v1/chat/completions", orjson.dumps(body), _GENERATE_SECONDS)
        return raw[0], _object(raw[1])

    async def _get(self, path: str) -> Answer:
        status, raw = await self._raw(self.upstream, "GET", path)
        return status, _object(raw)

    async def _raw(
        self, upstream: Upstream, method: str, path: str, body: bytes | None = None, seconds: float = _QUICK_SECONDS
    ) -> tuple[int, bytes]:
        body = body if method == "POST" else None
        answer = await upstream.fetch(method, path, body=body, seconds=seconds, limit_bytes=_ANSWER_BYTES)
        return (0, b"") if answer is None else (answer[0], answer[2])


def _long_text(tokens: int) -> str:
    """Return a text of about so many tokens that begins as no other does."""
    count = max(10, int(tokens / _TOKENS_PER_WORD))
    words = " ".join(_WORDS[(number * 7 + number // 10) % len(_WORDS)] for number in range(count))
    return f"{uuid.uuid4().hex}: {words}. Say yes."


def _usage(answer: Mapping[str, Any], name: str) -> int | None:
    usage = answer.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def _object(raw: bytes) -> Mapping[str, Any]:
    try:
        found = orjson.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
