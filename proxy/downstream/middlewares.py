"""What every request passes on its way to a handler, and every answer on its way back."""

import asyncio

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.typedefs import Handler

from proxy import logs
from proxy.core.reject import Reject
from proxy.downstream import cors
from proxy.downstream.auth import authenticate
from proxy.downstream.body import too_large
from proxy.downstream.errors import after_start, from_http_error, reject_response, unexpected_response
from proxy.downstream.origin import refuse_blind_posts
from proxy.downstream.paths import not_found_message, raw_path
from proxy.metrics import LEFT, ROUTES, UNMATCHED, WEBSOCKET
from proxy.state import CALLER, OUTCOME, RECEIVED_AT, REQUEST_ID, STARTED, STATE
from proxy.upstream.headers import request_id

# Served without a key, since an orchestrator has none, also in a drain, and not logged.  /metrics has its own rule,
# the status page at / asks for a key itself.
_OPEN = frozenset({"/health", "/ready", "/metrics", "/"})
# Their exchanges are logged by the relay, with model, tokens and trail.
_GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})


def route_of(request: web.Request) -> str:
    """Return the pattern of the route that a request matched, for labels: never the path itself."""
    resource = request.match_info.route.resource
    if resource is None or resource.canonical not in ROUTES:
        return UNMATCHED
    socket = request.method == hdrs.METH_GET and resource.canonical == "/v1/chat/completions"
    return WEBSOCKET if socket else resource.canonical


@web.middleware
async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, and count it from its receipt to the end of its answer, however it ends."""
    request[REQUEST_ID] = request_id(request.headers.get("X-Request-Id"))
    request[RECEIVED_AT] = asyncio.get_running_loop().time()
    metrics, route = request.app[STATE].metrics, route_of(request)
    metrics.begin(route)
    status, outcome = LEFT, "client_disconnect"
    try:
        response = await handler(request)
        status, outcome = response.status, "completed" if response.status < 400 else "rejected"
        return response
    finally:
        metrics.end(route, status, request.get(OUTCOME, outcome))
        _log(request, route, status, outcome)


def _log(request: web.Request, route: str, status: int, outcome: str) -> None:
    """Write the line of an exchange that nobody further in knew more about."""
    if request.path in _OPEN or (route in _GENERATING and OUTCOME in request):
        return
    caller = request.get(CALLER)
    logs.access(
        request_id=request[REQUEST_ID],
        route=route,
        status=status,
        outcome=request.get(OUTCOME, outcome),
        model="",
        seconds=asyncio.get_running_loop().time() - request[RECEIVED_AT],
        caller=caller.name if caller is not None else None,
    )


@web.middleware
async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever is raised further in into an answer in OpenAI's shape."""
    metrics = request.app[STATE].metrics
    try:
        return await handler(request)
    except Reject as reject:
        metrics.rejected(reject.code)
        response: web.StreamResponse = reject_response(reject)
    except web.HTTPException as error:
        metrics.rejected(None)
        response = from_http_error(error)
    except ConnectionError:
        # Writing to a client that has gone; aiohttp knows what to do.
        raise
    except Exception as error:
        request.setdefault(OUTCOME, "failed")
        response = unexpected_response(error)
    started = request.get(STARTED)
    return response if started is None else await after_start(request, started)


@web.middleware
async def preflighted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser's preflight; it has no route and carries no key."""
    origins = request.app[STATE].config.cors.origins
    if origins and cors.is_preflight(request):
        return cors.preflight(request, origins)
    return await handler(request)


@web.middleware
async def exact(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let through only what is on the list by exact method and path; raise Reject 404 or 405 for the rest."""
    route, path = request.match_info.route, raw_path(request.raw_path)
    resource = route.resource
    if resource is not None and (path == resource.canonical or not isinstance(resource, web.PlainResource)):
        return await handler(request)
    known = {each.canonical for each in request.app.router.resources()}
    refusal = request.match_info.http_exception
    if path in known and isinstance(refusal, web.HTTPMethodNotAllowed):
        allow = ", ".join(sorted(refusal.allowed_methods))
        message = f"This path takes {allow} only."
        raise Reject(405, message, code="method_not_allowed", headers={hdrs.ALLOW: allow})
    raise Reject(404, not_found_message(path, known), code="not_found")


@web.middleware
async def accepting(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse new work while the proxy drains."""
    if request.app[STATE].draining and request.path not in _OPEN:
        request[OUTCOME] = "drained"
        message = "The proxy is about to stop and takes no new requests. Try again in a moment."
        headers = {"Retry-After": "5", "Connection": "close"}
        raise Reject(503, message, "service_unavailable", code="draining", headers=headers)
    return await handler(request)


@web.middleware
async def authenticated(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Find out who calls; raise Reject 401 if keys are set and none of them was sent, 403 for a page's blind POST."""
    if request.path not in _OPEN:
        refuse_blind_posts(request, request.app[STATE].config)
        request[CALLER] = authenticate(request, request.app[STATE].config)
    return await handler(request)


# Outermost first: everything is counted; everything raised becomes an answer; a preflight must not need a route or a
# key; an unknown path is told before a key is asked for, since a wrong base URL is the first mistake of all; a draining
# proxy does no work; the key is the last question before the handler.
MIDDLEWARES = (counted, answered, preflighted, exact, accepting, authenticated)


async def add_response_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Put on every answer what all of them carry, streams and errors included (a signal, just before headers go)."""
    request[STARTED] = response
    # An answer to `Expect` goes out before any middleware has run.
    response.headers["X-Request-Id"] = request.get(REQUEST_ID) or request_id(request.headers.get("X-Request-Id"))
    response.headers.pop(hdrs.SERVER, None)
    if request.version < HttpVersion11 and response.content_length is None:
        # Only the end of the connection ends this body; aiohttp would keep it open for a client that asked for that.
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"
    origins = request.app[STATE].config.cors.origins
    if origins:
        cors.add_headers(request, response, origins)


async def expect_body(request: web.Request) -> web.StreamResponse | None:
    """Answer `Expect: 100-continue` (curl sends it with large bodies): refuse what is too large before it is sent."""
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        return reject_response(Reject(417, "This expectation is not supported."))
    limit = request.app[STATE].config.limits.body_bytes
    if (request.content_length or 0) > limit:
        return reject_response(too_large(limit))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # What was written is no part of the answer, whose size is counted from here.
    request.writer.output_size = 0
    return None
