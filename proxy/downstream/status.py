"""The status page at / and the events that keep it live.  The page holds no data; the events need an admin key."""

import asyncio
import base64
import hashlib
import re
from importlib.resources import files

import orjson
from aiohttp import web

from proxy.core.reject import Reject
from proxy.downstream.auth import require_admin
from proxy.downstream.middlewares import expect_body
from proxy.downstream.origin import refuse_foreign_pages
from proxy.metrics import LEFT
from proxy.overview import Overview
from proxy.state import CALLER, STATE

PATH = "/"
EVENTS_PATH = "/v1/internal/events"
SECONDS = 1.0
MOST_VIEWERS = 32
"""Each costs a write a second; a browser that forgot its tabs must not add up."""

# Read with the module: nothing may read a file while the loop runs.
_HTML = files("proxy.downstream").joinpath("status.html").read_bytes()

OVERVIEW = web.AppKey("overview", Overview)
VIEWERS = web.AppKey("viewers", set[object])
_PAGE = web.AppKey("page", bytes)
_POLICY = web.AppKey("policy", str)


def add_routes(app: web.Application) -> None:
    """Add the page and its events to the app."""
    app[_PAGE], app[_POLICY] = _HTML, policy(_HTML)
    app[OVERVIEW], app[VIEWERS] = Overview(app[STATE], seconds=SECONDS), set()
    app.router.add_get(PATH, status_page, expect_handler=expect_body)
    app.router.add_get(EVENTS_PATH, events, expect_handler=expect_body)


def policy(page: bytes) -> str:
    """Return the Content-Security-Policy of `page`: its own style and script by their digests, and nothing else."""

    def digests(tag: bytes) -> str:
        found = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in found)

    return (
        f"default-src 'none'; script-src {digests(b'script')}; style-src {digests(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def status_page(request: web.Request) -> web.Response:
    """Answer with the page, which is the same for everybody."""
    headers = {
        "Content-Security-Policy": request.app[_POLICY],
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return web.Response(body=request.app[_PAGE], content_type="text/html", charset="utf-8", headers=headers)


async def events(request: web.Request) -> web.StreamResponse:
    """Send the overview once a second as a server-sent event until the viewer goes or the proxy drains.

    Raises Reject 401 or 403 without the right to it, 503 above `MOST_VIEWERS`.
    """
    state, viewers = request.app[STATE], request.app[VIEWERS]
    refuse_foreign_pages(request, state.config)
    require_admin(request[CALLER])
    if len(viewers) >= MOST_VIEWERS:
        raise Reject(503, "Too many status pages are open.", "server_error", code="overloaded")
    viewer = object()
    viewers.add(viewer)
    try:
        moment = await request.app[OVERVIEW].now()
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        while not state.draining:
            await response.write(b"data: " + orjson.dumps(moment) + b"\n\n")
            await asyncio.sleep(SECONDS)
            moment = await request.app[OVERVIEW].now()
        await response.write(b"event: end\ndata: {}\n\n")
        await response.write_eof()
        return response
    except ConnectionError:
        return web.Response(status=LEFT)  # not written any more; aiohttp would log what is raised
    finally:
        viewers.discard(viewer)
