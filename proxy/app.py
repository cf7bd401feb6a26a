"""Composition root: builds the app, its state and its routes; closes everything in reverse."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from aiohttp import web

from proxy.admission import Admission
from proxy.aio import Tasks
from proxy.config import Config
from proxy.downstream import admin, chat, health, models, passthrough, status, websocket
from proxy.downstream.listener import Runner
from proxy.downstream.middlewares import MIDDLEWARES, add_response_headers, expect_body
from proxy.flight import Flights
from proxy.holding import Holding
from proxy.learning import Learning
from proxy.metrics import Metrics
from proxy.rates import Rates
from proxy.recorder import Recorder
from proxy.secret import load_secret
from proxy.sessions import Sessions
from proxy.state import STATE, State
from proxy.store.sessions import open_store
from proxy.upstream.client import Upstream
from proxy.upstream.probe import Templates
from proxy.upstream.tokens import TokenCounter
from proxy.upstream.vllm import Models, Vllm

_RECORDS_SECONDS = 10.0  # how long the end may wait for what is recorded to be written


class _ClassOnly(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's own log lines without tracebacks: the text of a parser's error quotes the request, keys included."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the class of the exception where the exception was."""
        error = kwargs.pop("exc_info", None)
        name = type(error).__name__ if isinstance(error, BaseException) else ""
        return msg, {**kwargs, "extra": {"error": name}}


def _connection_settings() -> Mapping[str, object]:
    """What every connection is handled with, whoever runs the app."""
    return {
        # aiohttp would inflate as its installed libraries allow; proxy.downstream.body does it within a limit.
        "auto_decompress": False,
        "access_log": None,
        "logger": _ClassOnly(logging.getLogger("proxy.connections"), {}),
        # Also the time that a client has for its first headers; SDKs give up idle connections long before.
        "keepalive_timeout": 75.0,
        # Cookies of other services on the same host can pass aiohttp's 8 KiB.
        "max_field_size": 32 * 1024,
        # How long the rest of a refused body is read and dropped, so that the client gets to see the refusal.
        "lingering_time": 5.0,
    }


def build_app(config: Config) -> web.Application:
    """Return the app for `config`; it opens what it needs on startup and closes it on cleanup."""
    app = web.Application(middlewares=MIDDLEWARES, handler_args=_connection_settings())
    tasks, upstream = Tasks(), Upstream(config.upstream)
    metrics = Metrics()
    cache = Models(upstream.fetch, tasks, refresh_seconds=config.models.refresh_seconds)
    metrics.known_models, cache.on_restart = cache.known, metrics.upstream_restarted
    app[STATE] = State(
        config=config, tasks=tasks, metrics=metrics, upstream=upstream, models=cache, vllm=Vllm(upstream.fetch, tasks)
    )
    app[STATE].rates = Rates(config.rates, metrics)
    app[STATE].admission = Admission(config.admission, metrics)
    app[STATE].flights = Flights(config.coalesce, tasks, metrics.coalesce)
    app[STATE].holding = Holding(config.coalesce, metrics.coalesce)
    # Closed in reverse: first no one polls or writes any more, then the connection to vLLM goes.
    app.cleanup_ctx.extend((_upstream, _sessions, _tasks, _recorder, _metrics_port))
    app.on_response_prepare.append(add_response_headers)
    _add_routes(app)
    return app


def _add_routes(app: web.Application) -> None:
    """Everything that is served, by exact method and path; what is not here is 404 without a call to vLLM."""
    router = app.router
    router.add_post("/v1/chat/completions", chat.chat_completions, expect_handler=expect_body)
    router.add_post("/v1/completions", chat.completions, expect_handler=expect_body)
    for path in passthrough.PATHS:
        router.add_post(path, passthrough.passthrough, expect_handler=expect_body)
    router.add_get("/v1/models", models.list_models, expect_handler=expect_body)
    router.add_get("/v1/models/{model:.+}", models.get_model, expect_handler=expect_body)
    router.add_get("/health", health.health, expect_handler=expect_body)
    router.add_get("/ready", health.ready, expect_handler=expect_body)
    router.add_get("/metrics", health.metrics, expect_handler=expect_body)
    admin.add_routes(app)
    status.add_routes(app)
    websocket.add_routes(app)


async def _upstream(app: web.Application) -> AsyncIterator[None]:
    yield
    await app[STATE].upstream.close()


async def _sessions(app: web.Application) -> AsyncIterator[None]:
    """The store and the table over it; the last of both is on disk before the process ends."""
    state = app[STATE]
    config = state.config
    state.secret = await asyncio.to_thread(load_secret, config)
    state.templates = Templates(state.vllm, state.models, state.tasks)
    state.counter = TokenCounter(config.tokens, state.vllm, state.models, state.tasks, state.metrics)
    delay = config.store.write_delay_seconds
    failed = state.metrics.store_failed
    async with open_store(config.database, write_delay_seconds=delay, on_failure=failed) as store:
        state.store, state.learning = store, Learning(store)
        await state.learning.load()
        state.sessions = Sessions(config, store, state.metrics)
        sweeper = state.tasks.spawn(_sweep(state), name="sessions-sweep")
        yield
        sweeper.cancel()


async def _sweep(state: State) -> None:
    while True:
        await asyncio.sleep(state.config.sessions.sweep_seconds)
        await state.sessions.sweep()


async def _tasks(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    state.tasks.spawn(state.models.run(), name="models-refresh")
    yield
    await state.tasks.close()


async def _recorder(app: web.Application) -> AsyncIterator[None]:
    """Where requests are recorded, what was queued is written before the process ends."""
    state = app[STATE]
    folder = state.config.record.dir
    if folder is None:
        yield
        return
    recorder = state.recorder = Recorder(state.config, Path(folder), state.secret)
    writing = state.tasks.spawn(recorder.run(), name="recorder")
    yield
    recorder.close()
    await asyncio.wait({writing}, timeout=_RECORDS_SECONDS)


async def _metrics_port(app: web.Application) -> AsyncIterator[None]:
    config = app[STATE].config
    if config.metrics.port is None:
        yield
        return
    own = web.Application(middlewares=MIDDLEWARES, handler_args=_connection_settings())
    own[STATE] = app[STATE]
    own.router.add_get("/metrics", health.metrics_on_own_port)
    runner = Runner(own)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.listen.host, config.metrics.port).start()
        yield
    finally:
        await runner.cleanup()
