"""Reads the settings of a running Open WebUI from its API, and changes the headers of its connections there.

The routes are those of 0.12.4: /openai/config, /api/v1/tasks/config, /api/v1/retrieval/config, for an admin.  What is
only in its environment is not told by any of them; whether it names users is seen by having it call us.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from proxy.doctor.sockets import own_address

_SECONDS = 15.0
_HEAR_SECONDS = 12.0  # Open WebUI gives up on a model list after 10
_EMPTY_LIST = b'{"object":"list","data":[]}'
_USER_HEADERS = ("x-openwebui-user-id", "x-openwebui-user-jwt")


@dataclass(frozen=True, slots=True)
class Connection:
    """One OpenAI connection, by its place in the list."""

    place: int
    url: str
    headers: Mapping[str, str]
    to_proxy: bool
    to_vllm: bool
    works: bool | None = None  # Open WebUI gets models there


@dataclass(frozen=True, slots=True)
class WebUI:
    """What an Open WebUI says of itself.  None is what could not be seen."""

    url: str
    problem: str = ""
    version: str | None = None
    connections: tuple[Connection, ...] | None = None
    names_users: bool | None = None
    tasks: Mapping[str, Any] = field(default_factory=dict)
    documents: Mapping[str, Any] = field(default_factory=dict)


class Api:
    """The admin routes of one Open WebUI."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None) -> None:
        self._session, self.url = session, url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Return the status (0: no answer) and the JSON value, None if it is none."""
        try:
            async with self._session.request(
                method, self.url + path, json=body, headers=self._headers, allow_redirects=False
            ) as answer:
                raw = await answer.read()
                with suppress(ValueError):
                    return answer.status, json.loads(raw)
                return answer.status, None
        except (aiohttp.ClientError, TimeoutError):
            return 0, None


def open_session() -> aiohttp.ClientSession:
    """Return a session for `Api`."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS), trust_env=False)


async def look(api: Api, *, proxy: str, upstream: str | None, has_key: bool) -> WebUI:
    """Return what is seen of it; `proxy` and `upstream` are the URLs by which its connections are told apart."""
    status, told = await api.call("GET", "/api/version")
    version = told.get("version") if status == 200 and isinstance(told, dict) else None
    if not isinstance(version, str):
        why = "cannot be reached at this address" if status == 0 else f"answers {status} to /api/version"
        return WebUI(api.url, problem=f"Open WebUI {why}.")
    if not has_key:
        return WebUI(api.url, version=version)
    status, config = await api.call("GET", "/openai/config")
    if status != 200 or not isinstance(config, dict):
        return WebUI(api.url, version=version, problem=f"Open WebUI does not take this key (it answers {status}).")
    return WebUI(
        api.url,
        version=version,
        connections=tuple([await _verified(api, config, each) for each in connections(config, proxy, upstream)]),
        names_users=await _names_users(api),
        tasks=await _settings(api, "/api/v1/tasks/config"),
        documents=await _settings(api, "/api/v1/retrieval/config"),
    )


async def _settings(api: Api, path: str) -> Mapping[str, Any]:
    _, told = await api.call("GET", path)
    return told if isinstance(told, dict) else {}


def connections(config: Mapping[str, Any], proxy: str, upstream: str | None) -> Sequence[Connection]:
    """Return the connections of Open WebUI's /openai/config."""
    urls = [str(url) for url in config.get("OPENAI_API_BASE_URLS") or []]
    found = []
    for place, url in enumerate(urls):
        settings = settings_of(config, place)
        if settings.get("enable", True):
            told = settings.get("headers")
            headers = {str(name): str(value) for name, value in told.items()} if isinstance(told, dict) else {}
            to_proxy = _same(url, proxy)
            found.append(Connection(place, url, headers, to_proxy, not to_proxy and _same(url, upstream or "")))
    return found


def settings_of(config: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    """Return the settings of the connection at `place`; older versions keep them by URL."""
    configs = config.get("OPENAI_API_CONFIGS") or {}
    found = configs.get(str(place)) or configs.get(config["OPENAI_API_BASE_URLS"][place]) or {}
    return found if isinstance(found, dict) else {}


def _same(one: str, other: str) -> bool:
    """Say whether two URLs mean one server: by port, since each side of a container has its own name for the host."""
    try:
        return bool(other) and URL(one).port == URL(other).port
    except ValueError:
        return False


async def _verified(api: Api, config: Mapping[str, Any], connection: Connection) -> Connection:
    if not connection.to_proxy:
        return connection
    keys = config.get("OPENAI_API_KEYS") or []
    key = str(keys[connection.place]) if connection.place < len(keys) else ""
    body = {"url": connection.url, "key": key, "config": dict(settings_of(config, connection.place))}
    status, _ = await api.call("POST", "/openai/verify", body)
    return Connection(connection.place, connection.url, connection.headers, True, False, status == 200)


async def _names_users(api: Api) -> bool | None:
    """Have Open WebUI ask us for models, as it would ask a new connection, and see whether it says for whom.

    Nothing is saved there.  None where it does not reach us.
    """
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(_EMPTY_LIST)}\r\n"
            writer.write(head.encode() + b"Connection: close\r\n\r\n" + _EMPTY_LIST)
            await writer.drain()
        writer.close()

    where = URL(api.url)
    host = await asyncio.to_thread(own_address, where.host or "", where.port or 80) or "127.0.0.1"
    server = await asyncio.start_server(answer, host, 0)
    async with server:
        url = f"http://{host}:{server.sockets[0].getsockname()[1]}/v1"
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEAR_SECONDS):
                await api.call("POST", "/openai/verify", {"url": url, "key": "doctor", "config": {}})
    if not heard:
        return None
    names = {line.partition(b":")[0].strip().lower().decode("latin-1") for line in heard[0].split(b"\r\n")[1:]}
    return any(name in names for name in _USER_HEADERS)


async def set_headers(api: Api, wanted: Mapping[int, Mapping[str, str]]) -> bool:
    """Set the custom headers of the connections at these places and nothing else; say whether that was taken."""
    status, config = await api.call("GET", "/openai/config")
    if status != 200 or not isinstance(config, dict):
        return False
    configs = dict(config.get("OPENAI_API_CONFIGS") or {})
    for place, headers in wanted.items():
        configs[str(place)] = {**settings_of(config, place), "headers": dict(headers)}
    status, _ = await api.call("POST", "/openai/config/update", {**config, "OPENAI_API_CONFIGS": configs})
    return status == 200
