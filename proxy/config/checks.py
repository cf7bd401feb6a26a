"""Checks of single values: each returns the value as it is kept, or raises ValueError with what is wrong with it."""

import ipaddress
import os.path
import re
from urllib.parse import urlsplit

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")  # token of RFC 9110, 5.6.2
_HASH = re.compile(r"sha256\$[0-9a-f]{32,128}\$[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAG = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[?[0-9A-Fa-f:.]{2,45}\]?")


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a socket on `host` (an address, or localhost)."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def upstream_url(value: str) -> str:
    """Normalise vLLM's address: no trailing slash, no trailing /v1; `unix:///p` becomes `unix:/p`."""
    if value.startswith("unix:"):
        path = value.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/") or "\0" in path:
            raise ValueError("the socket's path must be absolute")
        return "unix:" + path
    parts = urlsplit(value)
    if "@" in parts.netloc:
        raise ValueError("a key in the address would show in logs; set upstream.api_key instead")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"did you mean http://{value}?" if "://" not in value else "it has another scheme or no host")
    if parts.query or parts.fragment or re.search(r"[\s\x00-\x1f\x7f]", value):
        raise ValueError("it has a query, a fragment or white space")
    _ = parts.port  # raises ValueError where it is no port
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


def header_name(value: str) -> str:
    """Accept the name of a header."""
    if not _HEADER.fullmatch(value):
        raise ValueError("it has characters that a header's name cannot have")
    return value


def header_value(value: str) -> str:
    """Accept a secret that goes into a header: visible ASCII."""
    if not value or not all("!" <= c <= "~" for c in value):
        raise ValueError("it is empty or has characters that a header cannot carry")
    return value


def not_empty(value: str) -> str:
    """Accept any text but the empty one, and none with a NUL, which no path or address can hold."""
    if not value.strip() or "\0" in value:
        raise ValueError("it is empty")
    return value


def path(value: str) -> str:
    """Accept the path of a file, `~` meaning the user's home, or :memory:."""
    return os.path.expanduser(not_empty(value))


def host(value: str) -> str:
    """Accept an address or host name to listen on; `[::1]` is kept as `::1`."""
    if not _HOST.fullmatch(value):
        raise ValueError("it is no address and no host name")
    return value.removeprefix("[").removesuffix("]")


def hosts(values: tuple[str, ...]) -> tuple[str, ...]:
    """Accept host names without port or path, kept in lower case."""
    return tuple(host(value).lower() for value in values)


def origins(values: tuple[str, ...]) -> tuple[str, ...]:
    """Accept browser origins as a browser writes them: scheme, host and port, or `*`."""
    for value in values:
        parts = urlsplit(value)
        if value != "*" and (parts.scheme not in ("http", "https") or f"{parts.scheme}://{parts.netloc}" != value):
            raise ValueError("an origin is like https://chat.example:8080, without a path or a trailing slash")
    return tuple(value.lower() for value in values)


def tags(values: tuple[str, ...]) -> tuple[str, ...]:
    """Accept names of tags, without the angle brackets."""
    if not all(_TAG.fullmatch(value) for value in values):
        raise ValueError("a tag's name is letters, digits, dot, dash or underscore, without angle brackets")
    return values


def key_hash(value: str) -> str:
    """Accept a hash as `prefix-proxy keys` prints it: sha256$<salt hex>$<digest hex>."""
    if not _HASH.fullmatch(value):
        raise ValueError("it has another form; `prefix-proxy keys NAME` makes one")
    return value


def key_name(value: str) -> str:
    """Accept the name of a key: it shows in logs and is the tenant of its callers."""
    if not _NAME.fullmatch(value) or value in ("anonymous", "local"):
        raise ValueError("a name is up to 64 letters, digits, dots, dashes or underscores, not anonymous or local")
    return value


def long_secret(value: str) -> str:
    """Accept a secret that cannot be guessed by trying."""
    if len(value) < 16:
        raise ValueError("it is shorter than 16 characters")
    return value
