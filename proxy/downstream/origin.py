"""Is a request a page's doing?  Pages of any site can reach a proxy on the user's own machine through the browser."""

import ipaddress
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from proxy.config import Config
from proxy.core.reject import Reject

_PORTS = {"http": 80, "https": 443}


def refuse_foreign_pages(request: web.Request, config: Config) -> None:
    """Raise Reject 403 if a browser sends this for a page that is not ours.

    A page names itself in `Origin` (on every POST and WebSocket) and must be of the host and port that it calls;
    browsers that know `Sec-Fetch-Site` also say so of a GET.  Without keys the Host header must be a name of ours too:
    a page whose own name was made to resolve to this machine (DNS rebinding) has an Origin that matches, but not our
    name.
    """
    host = request.headers.get(hdrs.HOST, "")
    origins = request.headers.getall(hdrs.ORIGIN, [])
    if any(not _same_place(origin, host) for origin in origins):
        raise _refused("A page of another origin may not use this path.")
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise _refused("A page of another origin may not use this path.")
    _refuse_foreign_names(request, config)


def refuse_foreign_sockets(request: web.Request, config: Config) -> None:
    """Raise Reject 403 for a WebSocket of a page that is neither ours nor of `cors.origins`; no preflight asks."""
    origins, allowed = request.headers.getall(hdrs.ORIGIN, []), config.cors.origins
    if origins and all(each in allowed or "*" in allowed for each in origins):
        _refuse_foreign_names(request, config)
    else:
        refuse_foreign_pages(request, config)


def _refuse_foreign_names(request: web.Request, config: Config) -> None:
    if not config.keys and not _is_ours(request.headers.get(hdrs.HOST, ""), request, config):
        raise _refused("The Host header is not a name of this proxy. listen.allow_hosts can add it.")


def refuse_blind_posts(request: web.Request, config: Config) -> None:
    """Raise Reject 403 for a POST that a page of another origin could send without asking, while there are no keys.

    A page may POST text or a form anywhere unseen; it cannot read the answer, but it would have the GPU work.  JSON
    needs a preflight, which only origins of the settings pass.
    """
    if config.keys or request.method != hdrs.METH_POST or request.content_type == "application/json":
        return
    host, allowed = request.headers.get(hdrs.HOST, ""), config.cors.origins
    origins = request.headers.getall(hdrs.ORIGIN, [])
    if any(o not in allowed and "*" not in allowed and not _same_place(o, host) for o in origins):
        raise _refused("A page of another origin may send JSON only, and only if cors.origins names it.")


def _refused(message: str) -> Reject:
    return Reject(403, message, "permission_error", code="forbidden")


def _split(netloc: str, scheme: str) -> tuple[str, int] | None:
    try:
        parts = urlsplit(f"//{netloc}")
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname or parts.path or parts.query or parts.fragment or "@" in netloc:
        return None
    return parts.hostname.rstrip("."), port if port is not None else _PORTS[scheme]


def _same_place(origin: str, host: str) -> bool:
    # "null" is the origin of files and of sandboxed frames, which any site can make.
    scheme, mark, netloc = origin.lower().partition("://")
    if not mark or scheme not in _PORTS:
        return False
    place = _split(netloc, scheme)
    return place is not None and place == _split(host.lower(), scheme)


def _is_ours(host: str, request: web.Request, config: Config) -> bool:
    found = _split(host.lower(), "http")
    if found is None:
        return False
    name = found[0]
    if name in {"localhost", config.listen.host.lower(), *(each.lower() for each in config.listen.allow_hosts)}:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    # An address cannot be rebound; still only those at which we are reached.
    own = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return address.is_loopback or (isinstance(own, tuple) and str(address) == str(own[0]).partition("%")[0])
