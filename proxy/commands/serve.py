"""`prefix-proxy serve`: listen, serve, and drain when told to stop."""

import argparse
import asyncio
import errno
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from proxy import logs
from proxy.app import build_app
from proxy.config import Loaded, SettingError
from proxy.config.flags import add_setting_flags, setting_flags
from proxy.config.load import load_settings
from proxy.downstream.listener import Runner
from proxy.downstream.websocket import SOCKETS
from proxy.state import STATE, State

Beside = Callable[[web.Application], AsyncIterator[None]]
_BACKLOG = 1024  # a page of Open WebUI and its tasks come in bursts
# What is still running when the drain is over gets this long to see its end.
_CUT_SECONDS = 1.0
# New objects before the youngest are looked at (a request of 400 messages makes 3,000), and how many such looks bring
# one at the older ones.
_COLLECT = (20_000, 20, 10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the settings."""
    add_setting_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; raises SettingError for a setting that cannot be used or a port that is taken."""
    loaded = load_settings(setting_flags(args))
    logs.configure(loaded.config.log)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(loaded))
    return 0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the event loop; None for Python's own."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return None
    return uvloop.new_event_loop


def _calm_collector() -> None:
    """Have Python look for cycles seldom: at its defaults that takes a third of the time of a large request.

    What is there before the first request stays for good, and is not looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT)


async def serve(loaded: Loaded, *, beside: Beside | None = None) -> None:
    """Serve with these settings until told to stop; streams that run then may end.  Raises SettingError.

    `beside` is begun with the app, and ended after its last answer and before anything else of it.
    """
    app = build_app(loaded.config)
    if beside is not None:
        app.cleanup_ctx.append(beside)
    runner = Runner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CUT_SECONDS)
    told = _told_to_stop()
    try:
        site = await _listen(runner, loaded)
        _calm_collector()
        print(f"prefix-proxy listens on {_url(runner)}, upstream {loaded.config.upstream.url}", flush=True)
        await told.wait()
        await _drain(runner, site, app[STATE])
    finally:
        await runner.cleanup()


def _told_to_stop() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second ends the process at once, nothing flushed."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop(number: int) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return told


async def _listen(runner: web.AppRunner, loaded: Loaded) -> web.TCPSite:
    listen, metrics = loaded.config.listen, loaded.config.metrics
    try:
        await runner.setup()
    except OSError as error:
        if metrics.port is None:
            what = (error.strerror or type(error).__name__).lower()
            raise SettingError(
                f"The proxy cannot start: {what}{f' ({error.filename})' if error.filename else ''}."
            ) from None
        raise _cannot_listen(loaded, "metrics.port", metrics.port, error) from None
    site = web.TCPSite(runner, listen.host, listen.port, backlog=_BACKLOG)
    try:
        await site.start()
    except OSError as error:
        raise _cannot_listen(loaded, "listen.port", listen.port, error) from None
    return site


def _cannot_listen(loaded: Loaded, path: str, port: int, error: OSError) -> SettingError:
    reasons = {
        errno.EADDRINUSE: "another program listens there; allowed: a free port",
        errno.EACCES: "the system does not let this user listen there; allowed: a port from 1,024 on",
        errno.EADDRNOTAVAIL: "this machine does not have that address; allowed: one of its own",
    }
    reason = reasons.get(error.errno or 0, "the system refuses that address")
    return SettingError(f"{loaded.spelling(path)} = {port} on {loaded.config.listen.host} cannot be used: {reason}.")


def _url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _drain(runner: web.AppRunner, site: web.TCPSite, state: State) -> None:
    """Take no new work, close idle connections, let the others end, and end those with an error that do not in time."""
    state.draining = True
    runner.app[SOCKETS].release()
    await site.stop()
    server, seconds = runner.server, state.config.drain.seconds
    assert server is not None
    # A request that arrived with the signal shall begin, and so count, before idle connections are closed.
    await asyncio.sleep(0)
    # The first call ends what serves an idle connection, the second closes that and waits for the others.
    server.pre_shutdown()
    ending = state.tasks.spawn(server.shutdown(seconds + _CUT_SECONDS), name="drain")
    _, running = await asyncio.wait({ending}, timeout=seconds)
    if running:
        state.presence.end_all()
        await asyncio.wait(running, timeout=_CUT_SECONDS)
    ending.cancel()
