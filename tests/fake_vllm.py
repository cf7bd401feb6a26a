"""A small real server that behaves as vLLM 0.32.0 does on the wire, and can be told to fail in each way.

It has vLLM's routes, refusals, events and prefix cache (`fake_engine`), answers what a test scripts
(`fake_replies`), and keeps every request that it saw.  See tests/README.md for how to use it.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fake_engine import PrefixCache, Refused, Rules, Vocabulary, check, check_chat, render, room
from tests.fake_faults import SEEN, Seen, break_off, forever, write_raw
from tests.fake_metrics import Gauges
from tests.fake_replies import Drop, Raw, Reply, Scripted, Writer
from tests.fake_routes import add_small_routes


@dataclass
class FakeVllm:
    """The server.  `await start()`, script `replies` (used in order) or `reply_to`, read `seen`, `await stop()`."""

    rules: Rules = field(default_factory=Rules)
    block_size: int = 16
    api_key: str | None = None
    dev_mode: bool = False
    keepalive_seconds: float = 5.0
    unix_path: Path | None = None
    count_tokens: bool = True  # off for load tests: prompts then have no tokens and nothing is cached
    default: Reply = field(default_factory=Reply)
    replies: deque[Scripted] = field(default_factory=deque)
    reply_to: Callable[[dict[str, Any]], Scripted | None] | None = None
    answers: dict[str, Scripted] = field(default_factory=dict)  # by path, for the routes that generate nothing
    generation_end: str = ""  # what the template puts at a prompt's end and leaves out of the history (Qwen3)
    drop_reused: int = 0  # so many next generations on a reused connection find it closed
    gauges: Gauges = field(default_factory=Gauges)  # what /metrics says of the engine's state
    seen: list[Seen] = field(default_factory=list)
    live: int = 0  # generations under way
    port: int = 0
    connections: int = 0

    def __post_init__(self) -> None:
        self.vocabulary = Vocabulary()
        self.cache = PrefixCache(self.block_size)
        self.queries = self.hits = 0
        self._news = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._requests_of: dict[object, list[int]] = {}

    @property
    def url(self) -> str:
        """The base URL, without /v1; also for a Unix socket: `unix:PATH`."""
        return f"unix:{self.unix_path}" if self.unix_path else f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen: on a free port, on the same one after a `stop`, or on the Unix socket."""
        app = web.Application(client_max_size=64 << 20, middlewares=[self._guard])
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        add_small_routes(app, self)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self.keepalive_seconds,
            shutdown_timeout=0.1,
        )
        await self._runner.setup()
        site = (
            web.UnixSite(self._runner, str(self.unix_path))
            if self.unix_path
            else web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        )
        await site.start()
        if not self.unix_path:
            self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close every connection and refuse new ones."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def generations(self) -> list[Seen]:
        """The requests that asked for an answer, in the order of their arrival."""
        return [seen for seen in self.seen if seen.path in ("/v1/chat/completions", "/v1/completions")]

    def of(self, path: str) -> list[Seen]:
        """Return the requests to `path`."""
        return [seen for seen in self.seen if seen.path == path]

    async def wait_for(self, count: int, within_seconds: float = 5.0) -> Seen:
        """Wait until `count` generations have arrived; return the last of these."""
        async with asyncio.timeout(within_seconds):
            while len(self.generations) < count:
                self._news.clear()
                await self._news.wait()
        return self.generations[count - 1]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        seen = await self._record(request)
        request[SEEN] = seen
        if self.api_key and request.path.startswith("/v1") and not self._authorised(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        with self._ending(seen):
            if (answer := self.answers.get(request.path)) is not None:
                return await self._scripted(request, answer)
            try:
                response: web.StreamResponse = await handler(request)
            except Refused as refusal:
                return web.json_response(refusal.body, status=refusal.status)
            except web.HTTPException as missing:
                return web.json_response({"detail": missing.reason}, status=missing.status)
            return response

    def _authorised(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def _record(self, request: web.Request) -> Seen:
        counted = self._requests_of.get(request.protocol)
        if counted is None:
            self.connections += 1
            counted = self._requests_of[request.protocol] = [self.connections, 0]
        counted[1] += 1
        now = asyncio.get_running_loop().time()
        seen = Seen(request.method, request.path, request.headers, b"", counted[0], counted[1], now)
        self.seen.append(seen)
        try:
            seen.raw = await request.read()
        except BaseException:
            seen.aborted_at = asyncio.get_running_loop().time()
            seen.closed.set()
            raise
        self._news.set()
        return seen

    @contextmanager
    def _ending(self, seen: Seen) -> Iterator[None]:
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            if not seen.broke_off:
                seen.aborted_at = asyncio.get_running_loop().time()
            raise
        finally:
            seen.ended_at = asyncio.get_running_loop().time()
            seen.closed.set()

    def _next(self, body: dict[str, Any]) -> Scripted:
        chosen = self.reply_to(body) if self.reply_to is not None else None
        return chosen or (self.replies.popleft() if self.replies else self.default)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen: Seen = request[SEEN]
        if seen.on_connection > 1 and self.drop_reused > 0:
            self.drop_reused -= 1
            return await self._scripted(request, Drop())
        self.live += 1
        try:
            body = json.loads(seen.raw)
            seen.body = body
            scripted = self._next(body)
            if not isinstance(scripted, Reply):
                return await self._scripted(request, scripted)
            limit = self._admit(seen, chat=request.path == "/v1/chat/completions")
            return await self._answer(request, seen, scripted, limit)
        except ValueError:
            raise Refused(400, "1 validation error: json_invalid", "Bad Request") from None
        finally:
            self.live -= 1

    def _admit(self, seen: Seen, *, chat: bool) -> int:
        """Check the request, look up its hit, enter its blocks; return how many tokens may be generated."""
        body = seen.body
        check(body, self.rules)
        if chat:
            check_chat(body, self.rules)
        if not self.count_tokens:
            return self.rules.max_model_len
        prompt = render(body) + self.generation_end if chat else body.get("prompt", "")
        seen.tokens = self.vocabulary.encode(prompt) if isinstance(prompt, str) else prompt
        seen.prompt = prompt if isinstance(prompt, str) else self.vocabulary.decode(prompt)
        limit = room(seen.n, body, self.rules)
        seen.hit = self.cache.hit(seen.tokens, body.get("cache_salt"))
        self.queries, self.hits = self.queries + seen.n, self.hits + seen.hit
        self.cache.store(seen.tokens, body.get("cache_salt"))  # when scheduled, not when computed
        return limit

    async def _answer(self, request: web.Request, seen: Seen, reply: Reply, limit: int) -> web.StreamResponse:
        pieces = list(reply.pieces if reply.pieces is not None else self._split(reply.text))
        cut = self.count_tokens and len(self.vocabulary.encode("".join(pieces))) > limit
        if cut:
            pieces = [self.vocabulary.decode([token]) for token in self.vocabulary.encode("".join(pieces))[:limit]]
        reply = replace(
            reply,
            pieces=pieces,
            finish_reason=reply.finish_reason or ("length" if cut else "tool_calls" if reply.calls else "stop"),
        )
        if seen.body.get("stream"):
            return await self._stream(request, seen, reply)
        return await self._plain(request, seen, reply)

    def _split(self, text: str) -> list[str]:
        return [self.vocabulary.decode([token]) for token in self.vocabulary.encode(text)]

    def _writer(self, request: web.Request, seen: Seen, reply: Reply) -> Writer:
        written = len(self.vocabulary.encode(reply.generated())) + 1
        usage = {
            "prompt_tokens": seen.n,
            "total_tokens": seen.n + written,
            "completion_tokens": written,
            "prompt_tokens_details": {"cached_tokens": seen.hit},
        }
        return Writer(
            reply=reply,
            body=seen.body,
            chat=seen.path == "/v1/chat/completions",
            name=request.headers.get("X-Request-Id") or f"fake-{len(self.seen)}",
            model=self.rules.model,
            usage=reply.usage or usage,
        )

    def _remember(self, seen: Seen, reply: Reply) -> None:
        """Enter the generated tokens; the last one (<|im_end|>) was sampled but never computed."""
        tokens = [*seen.tokens, *self.vocabulary.encode(reply.generated())]
        if self.count_tokens:
            self.cache.store(tokens, seen.body.get("cache_salt"))

    async def _plain(self, request: web.Request, seen: Seen, reply: Reply) -> web.Response:
        for gate in sorted(reply.gates, key=str):
            await reply.gates[gate].wait()
        seen.generated = len(reply.pieces or ())
        await asyncio.sleep(reply.gap_seconds * seen.generated)
        self._remember(seen, reply)
        return web.json_response(self._writer(request, seen, reply).whole())

    async def _stream(self, request: web.Request, seen: Seen, reply: Reply) -> web.StreamResponse:
        await reply.gate("headers")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)  # at once, even while the request is queued
        writer = self._writer(request, seen, reply)
        await reply.gate(0)
        await response.write(writer.opening())  # with the first token, not before
        for position, delta in enumerate(reply.chat_deltas(reply.pieces or ())):
            if position:
                await reply.gate(position)
            await response.write(writer.delta(delta))
            seen.generated = position + 1
            await asyncio.sleep(reply.gap_seconds)
        await reply.gate("end")
        await response.write(writer.closing())
        self._remember(seen, reply)
        await response.write_eof()
        return response

    async def _scripted(self, request: web.Request, scripted: Scripted) -> web.StreamResponse:
        if isinstance(scripted, Raw):
            return await write_raw(request, scripted)
        if isinstance(scripted, Drop):
            break_off(request, "cut")
        await forever()
