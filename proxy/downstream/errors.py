"""From a `Reject`, or an exception that nobody expected, to an answer in OpenAI's error shape."""

import logging
import traceback
from collections.abc import Mapping

import orjson
from aiohttp import web

from proxy.core.reject import Reject, error_body

log = logging.getLogger("proxy.errors")


def json_response(
    body: Mapping[str, object], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Build a JSON answer."""
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")


def reject_response(reject: Reject) -> web.Response:
    """Turn a refusal into its answer."""
    response = json_response(reject.body(), status=reject.status, headers=reject.headers)
    if reject.headers.get("Connection") == "close":
        response.force_close()
    return response


def upstream_error_body(raw: bytes, status: int) -> dict[str, object] | None:
    """Return an error of vLLM in OpenAI's shape, None if it is in that shape already (then its bytes can stay).

    vLLM has others too: `{"detail": ...}` for a route that its model lacks, `{"error": "Unauthorized"}` for a wrong
    key; something in between may send HTML, which no client could show.
    """
    try:
        told = orjson.loads(raw)
    except ValueError:
        told = None
    if isinstance(told, dict):
        if isinstance(told.get("error"), dict):
            return None
        text = next((told[name] for name in ("error", "detail", "message") if isinstance(told.get(name), str)), None)
        if text is not None:
            return error_body(f"The model server says: {text}", kind="upstream_error", code=status)
    return error_body(f"The model server answered with status {status}.", kind="upstream_error", code=status)


def unexpected_response(error: BaseException) -> web.Response:
    """Answer 500 for a fault of the proxy's own.

    The text of an exception may quote a request, a key or a path, so neither the client nor the log gets it: the log
    has its class and the place where it was raised.
    """
    log.error("unexpected_error", extra={"error": type(error).__name__, "where": place_of(error)})
    message = "The proxy failed while it handled this request. Its log has the place."
    return json_response(error_body(message, kind="internal_error", code="internal_error"), status=500)


def place_of(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of our own package, else of the innermost one, else ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/proxy/" in frame.filename]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"


def from_http_error(error: web.HTTPException) -> web.StreamResponse:
    """Turn an answer that aiohttp raised by itself (413, 417 and the like) into OpenAI's shape, without its text."""
    if error.status < 400:
        return json_response(error_body("Not found.", code="not_found"), status=404)
    kind = "invalid_request_error" if error.status < 500 else "internal_error"
    allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return json_response(error_body(f"{error.reason}.", kind=kind, code=None), status=error.status, headers=allow)


async def after_start(request: web.Request, started: web.StreamResponse) -> web.StreamResponse:
    """End an answer whose head has gone out already: a stream with an error event, anything else by hanging up.

    An answer that is complete already stays as it is: what failed after it is for the log only.
    """
    if started.body_length:
        return started
    if started.content_type == "text/event-stream":
        message = "The proxy failed in the middle of this answer."
        event = orjson.dumps(error_body(message, kind="internal_error", code="internal_error"))
        await started.write(b"\n\ndata: " + event + b"\n\ndata: [DONE]\n\n")
    elif request.transport is not None:
        # An end that looks complete would be a lie.
        request.transport.abort()
    started.force_close()
    return started
