"""Who calls: the key that a request carries, compared in constant time with the hashes in the settings."""

import hashlib
import hmac
import ipaddress
import secrets
from dataclasses import dataclass

from aiohttp import web

from proxy.config import Config, Key
from proxy.core.rates import Limit
from proxy.core.reject import Reject

# Headers by which another proxy on this machine tells that the caller is somewhere else.
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


SOCKET_PROTOCOL = "prefix-proxy"
_KEY_PROTOCOL = "openai-insecure-api-key."

NO_LIMIT = Limit("key")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: `name` is a key's name, "local" or "anonymous", fit for logs and as a tenant."""

    name: str
    authenticated: bool
    trusted: bool  # its identity headers count
    admin: bool  # may call /v1/internal/*
    max_output_tokens: int | None = None  # its own cap in place of lengths.max_output_tokens
    limit: Limit = NO_LIMIT


LOCAL = Caller("local", authenticated=False, trusted=True, admin=True)
ANONYMOUS = Caller("anonymous", authenticated=False, trusted=False, admin=False)


def new_token() -> str:
    """Make a key: 32 random bytes, so that nobody can find it by trying."""
    return "sk-pp-" + secrets.token_urlsafe(32)


def hash_token(token: str, salt: bytes | None = None) -> str:
    """Return `sha256$<salt hex>$<digest hex>` of a key.

    One round is enough: slow hashes protect passwords that people choose, and a key of 32 random bytes cannot be
    guessed however fast one tries; a slow hash here would let anyone burn the proxy's time with wrong keys.
    """
    salt = secrets.token_bytes(16) if salt is None else salt
    return f"sha256${salt.hex()}${hashlib.sha256(salt + _bytes(token)).hexdigest()}"


def matches(stored: str, token: str) -> bool:
    """Tell in constant time whether `token` is what was hashed to `stored`."""
    _, salt, _ = stored.split("$")
    return hmac.compare_digest(stored, hash_token(token, bytes.fromhex(salt)))


def authenticate(request: web.Request, config: Config) -> Caller:
    """Return who calls; raise Reject 401 when keys are set and the request carries none of them.

    Without keys a caller on this machine is trusted (Open WebUI beside the proxy), any other is nobody.
    """
    if not config.keys:
        return LOCAL if _is_local(request) else ANONYMOUS
    token = presented_token(request)
    if token is None:
        raise _unauthorized("This proxy needs an API key: send it as Authorization: Bearer KEY.")
    key = _find(config.keys, token)
    if key is None:
        raise _unauthorized("The API key is not known to this proxy.")
    limit = Limit("key", key.requests_per_minute, key.tokens_per_minute, key.concurrent)
    return Caller(key.name, True, key.trusted, key.admin, key.max_output_tokens, limit)


def require_admin(caller: Caller) -> None:
    """Raise Reject 403 unless the caller may use the internal routes."""
    if not caller.admin:
        raise Reject(403, "This needs a key that is marked admin.", "permission_error", code="forbidden")


def presented_token(request: web.Request) -> str | None:
    """Return the key that a request carries; `x-api-key` counts on /v1/messages, whose clients send nothing else."""
    given = request.headers.getall("Authorization", [])
    if len(given) == 1:
        scheme, _, token = given[0].partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None
    if not given and (offered := request.headers.get("Sec-WebSocket-Protocol")) is not None:
        # A page cannot give its WebSocket a header of its own; this is where OpenAI's clients put the key then.
        found = [each.strip() for each in offered.split(",") if each.strip().startswith(_KEY_PROTOCOL)]
        return found[0].removeprefix(_KEY_PROTOCOL) or None if len(found) == 1 else None
    if given or not request.path.startswith("/v1/messages"):
        return None
    own = request.headers.getall("x-api-key", [])
    return own[0].strip() or None if len(own) == 1 else None


def _find(keys: tuple[Key, ...], token: str) -> Key | None:
    # Every hash is compared, also after a match, so that the time tells nothing of which key it was.
    found = None
    for key in keys:
        if matches(key.hash, token):
            found = key
    return found


def _is_local(request: web.Request) -> bool:
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not isinstance(peer, tuple) or any(name in request.headers for name in _FORWARDED):
        return False
    if peer[0] == "127.0.0.1":
        return True
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogateescape")


def _unauthorized(message: str) -> Reject:
    return Reject(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
