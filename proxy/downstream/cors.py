"""CORS for browsers that call the proxy directly: off unless origins are configured."""

import re

from aiohttp import hdrs, web

# What a browser may ask for at once; the list goes back to it as it came.
_LONGEST = 4096
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_EXPOSED = "X-Request-Id, X-Prefix-Proxy-Trail, X-Prefix-Proxy-Stale, Retry-After"
_PREFLIGHT_SECONDS = "600"


def is_preflight(request: web.Request) -> bool:
    """Return whether a browser asks what it may send, rather than for anything."""
    headers = request.headers
    return request.method == hdrs.METH_OPTIONS and hdrs.ORIGIN in headers and "Access-Control-Request-Method" in headers


def preflight(request: web.Request, origins: tuple[str, ...]) -> web.Response:
    """Answer a preflight: 204, without asking for a key, since browsers send none with it."""
    response = web.Response(status=204)
    if allowed_origin(request, origins) is None:
        return response
    response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
    response.headers["Access-Control-Max-Age"] = _PREFLIGHT_SECONDS
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    # Every name asked for: SDKs add headers of their own (x-stainless-*), and a wildcard never covers Authorization.
    if len(wanted) <= _LONGEST and _HEADER_NAMES.fullmatch(wanted):
        response.headers["Access-Control-Allow-Headers"] = wanted
    return response


def allowed_origin(request: web.Request, origins: tuple[str, ...]) -> str | None:
    """Return the value of Access-Control-Allow-Origin for this request, None for an origin that is not on the list."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None


def add_headers(request: web.Request, response: web.StreamResponse, origins: tuple[str, ...]) -> None:
    """Put the CORS headers on an answer, whichever it is: a browser shows an error without them as no answer at all."""
    if "*" not in origins:
        vary = response.headers.get(hdrs.VARY)
        response.headers[hdrs.VARY] = f"{vary}, Origin" if vary else "Origin"
    origin = allowed_origin(request, origins)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED
