"""The internal routes, asked over real sockets, with a small table over the real store."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import web

from proxy.config import Key
from proxy.core.past import Outcome
from proxy.downstream import admin
from proxy.downstream.auth import hash_token
from proxy.store import SessionInfo, SessionKey, SessionRow, SessionStore
from tests.conftest import RunningProxy, StartProxy
from tests.fake_vllm import FakeVllm
from tests.store_help import key, row

if TYPE_CHECKING:
    from proxy.sessions import Sessions

CLEAR = "/v1/internal/session/clear"
LIST = "/v1/internal/sessions"


class SmallTable:
    """Sessions in a dict, behind them the store: what the routes need of a table, and no more."""

    def __init__(self, store: SessionStore, *rows: SessionRow) -> None:
        self.store, self.rows = store, {each.key: each for each in rows}
        for each in rows:
            store.put(each)

    async def stored(self) -> list[SessionInfo]:
        return []

    def list(self) -> list[SessionInfo]:
        newest = sorted(self.rows.values(), key=lambda each: each.last_seen, reverse=True)
        return [self._info(each) for each in newest]

    def get(self, id: str, /) -> SessionInfo | None:
        return next((self._info(each) for found, each in self.rows.items() if found.id == id), None)

    def exchanges(self, id: str, /) -> Sequence[Outcome]:
        return ()

    async def clear(self, *, id: str | None = None, everything: bool = False) -> int:
        gone = [found for found, each in self.rows.items() if everything or self._is_meant(found, each, id)]
        for found in gone:
            del self.rows[found]
        return await self.store.clear(keys=gone, everything=everything)

    @staticmethod
    def _is_meant(found: SessionKey, each: SessionRow, id: str | None) -> bool:
        return each.expires < time.time() if id is None else found.id == id

    @staticmethod
    def _info(each: SessionRow) -> SessionInfo:
        left = max(each.expires - time.time(), 0.0)
        return SessionInfo(each.key.id, each.key.model, each.turns, each.created, each.last_seen, left, each.size_bytes)


def fill(proxy: RunningProxy) -> SmallTable:
    """Give the proxy three sessions, the first of which is over."""
    now = time.time()
    store = proxy.state.store
    assert store is not None
    table = SmallTable(store, row(1, now=now - 5000), row(2, now=now - 20, state=b"secret words"), row(3, now=now - 10))
    proxy.state.sessions = cast("Sessions", table)
    return table


async def ask(
    proxy: RunningProxy, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    async with proxy.session.request(method, proxy.url + path, data=body, headers=fields) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("body", [b"", b"{}", b" {} \n"])
async def test_without_a_wish_only_expired_sessions_are_cleared(proxy: RunningProxy, body: bytes) -> None:
    table = fill(proxy)
    assert await ask(proxy, "POST", CLEAR, body) == (200, {"status": "success", "cleared": 1})
    assert [info.id for info in table.list()] == [key(3).id, key(2).id]
    assert await table.store.load(key(2)) is not None


async def test_one_session_is_cleared_by_its_id_and_an_unknown_id_clears_none(proxy: RunningProxy) -> None:
    table = fill(proxy)
    body = b'{"session": "%s"}' % key(2).id.encode()
    assert await ask(proxy, "POST", CLEAR, body) == (200, {"status": "success", "cleared": 1})
    assert await ask(proxy, "POST", CLEAR, body) == (200, {"status": "success", "cleared": 0})
    assert table.get(key(3).id) is not None and await table.store.load(key(2)) is None


async def test_all_are_cleared_and_vllm_is_left_alone_unless_it_is_asked_for(
    start_vllm: Any, start_proxy: StartProxy
) -> None:
    vllm: FakeVllm = await start_vllm(dev_mode=True)
    proxy = await start_proxy(upstream__url=vllm.url)
    fill(proxy)
    assert await ask(proxy, "POST", CLEAR, b'{"all": true}') == (200, {"status": "success", "cleared": 3})
    fill(proxy)
    wanted = {"status": "success", "cleared": 3, "upstream_cache": True}
    assert await ask(proxy, "POST", CLEAR, b'{"all": true, "upstream_cache": true}') == (200, wanted)


async def test_a_vllm_without_that_route_is_told_apart(proxy: RunningProxy) -> None:
    fill(proxy)
    wanted = {"status": "success", "cleared": 3, "upstream_cache": False}
    assert await ask(proxy, "POST", CLEAR, b'{"all": true, "upstream_cache": true}') == (200, wanted)


@pytest.mark.parametrize(
    "body",
    [
        b'{"all": 1}',
        b'{"all": "true"}',
        b'{"all": false}',
        b'{"upstream_cache": true}',
        b'{"all": true, "upstream_cache": 1}',
        b'{"all": true, "session": "x"}',
        b'{"session": 5}',
        b'{"session": ""}',
        b'{"session": null}',
        b'{"force": true}',
        b"[]",
        b"null",
        b"true",
        b"{",
        b"\xff",
    ],
)
async def test_any_other_body_clears_nothing(proxy: RunningProxy, body: bytes) -> None:
    table = fill(proxy)
    status, answer = await ask(proxy, "POST", CLEAR, body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert "expired sessions" in answer["error"]["message"]
    assert len(table.rows) == 3


async def test_a_body_of_any_length_is_refused_before_it_is_kept(proxy: RunningProxy) -> None:
    fill(proxy)
    assert (await ask(proxy, "POST", CLEAR, b" " * 5000))[0] == 413


async def test_the_list_has_numbers_and_no_text(proxy: RunningProxy) -> None:
    fill(proxy)
    status, answer = await ask(proxy, "GET", LIST)
    assert status == 200 and answer["total"] == 3
    assert [each["id"] for each in answer["sessions"]] == [key(3).id, key(2).id, key(1).id]
    first, _, last = answer["sessions"]
    assert "exchanges" not in first and set(first) == {
        "id",
        "model",
        "turns",
        "created",
        "last_seen",
        "expires_seconds",
        "bytes",
    }
    assert 1700 < first["expires_seconds"] <= 1800 and last["expires_seconds"] == 0
    assert "secret" not in str(answer)


async def test_the_list_is_narrowed_by_limit_and_model(proxy: RunningProxy) -> None:
    fill(proxy)
    _, answer = await ask(proxy, "GET", LIST + "?limit=1")
    assert answer["total"] == 3 and len(answer["sessions"]) == 1
    assert (await ask(proxy, "GET", LIST + "?model=m"))[1]["total"] == 3
    assert (await ask(proxy, "GET", LIST + "?model=other"))[1] == {"sessions": [], "total": 0}
    for bad in ("0", "-1", "1001", "x", "", "1e3", "%D9%A1", "9" * 5000):
        status, answer = await ask(proxy, "GET", f"{LIST}?limit={bad}")
        assert status == 400 and answer["error"]["param"] == "limit"


async def test_one_session_is_described_and_an_unknown_one_is_404(proxy: RunningProxy) -> None:
    fill(proxy)
    status, answer = await ask(proxy, "GET", f"{LIST}/{key(2).id}")
    assert status == 200 and answer["id"] == key(2).id
    for unknown in (key(9).id, "x", key(2).id.upper()):
        assert (await ask(proxy, "GET", f"{LIST}/{unknown}"))[0] == 404


async def test_an_admin_key_is_needed_where_keys_are_set(start_proxy: StartProxy) -> None:
    keys = (Key("boss", hash_token("sk-admin"), admin=True), Key("webui", hash_token("sk-user"), trusted=True))
    proxy = await start_proxy(keys=keys)
    fill(proxy)
    for method, path in (("POST", CLEAR), ("GET", LIST), ("GET", f"{LIST}/{key(2).id}")):
        assert (await ask(proxy, method, path))[0] == 401
        assert (await ask(proxy, method, path, Authorization="Bearer wrong"))[0] == 401
        assert (await ask(proxy, method, path, Authorization="Bearer sk-user"))[0] == 403
        assert (await ask(proxy, method, path, Authorization="Bearer sk-admin"))[0] == 200
    assert (await ask(proxy, "GET", CLEAR, Authorization="Bearer sk-admin"))[0] == 405


async def test_a_caller_elsewhere_is_no_admin_without_keys(proxy: RunningProxy) -> None:
    fill(proxy)
    assert (await ask(proxy, "POST", CLEAR, X_Forwarded_For="203.0.113.7"))[0] == 403


async def test_a_page_of_another_site_can_neither_clear_nor_read(proxy: RunningProxy) -> None:
    """A browser on the same machine is a loopback caller: only what it says of the page tells it apart."""
    table = fill(proxy)
    foreign = ("https://evil.example", "null", "http://127.0.0.1:1", f"https://127.0.0.1:{proxy.port}.evil.example")
    for origin in foreign:
        assert (await ask(proxy, "POST", CLEAR, b'{"all": true}', Origin=origin))[0] == 403
    assert (await ask(proxy, "GET", LIST, Sec_Fetch_Site="cross-site"))[0] == 403
    rebound = f"evil.example:{proxy.port}"
    assert (await ask(proxy, "POST", CLEAR, b'{"all": true}', Host=rebound, Origin=f"http://{rebound}"))[0] == 403
    assert len(table.rows) == 3
    own = f"http://127.0.0.1:{proxy.port}"
    assert (await ask(proxy, "GET", LIST, Origin=own, Sec_Fetch_Site="same-origin"))[0] == 200
    assert (await ask(proxy, "POST", CLEAR, b'{"all": true}', Origin=own))[0] == 200


async def test_a_caller_who_hangs_up_while_clearing_breaks_nothing(proxy: RunningProxy) -> None:
    table = fill(proxy)
    for _ in range(5):
        call = asyncio.ensure_future(ask(proxy, "POST", CLEAR, b'{"all": true}'))  # noqa: TID251  # to hang up
        await asyncio.sleep(0.001)
        call.cancel()
    await table.store.flush()
    assert table.store.degraded is None and (await ask(proxy, "GET", LIST))[0] == 200


def test_the_routes_are_added_by_one_call() -> None:
    app = web.Application()
    admin.add_routes(app)
    assert [resource.canonical for resource in app.router.resources()] == [CLEAR, LIST, LIST + "/{id}"]
