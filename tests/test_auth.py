"""Keys: who is let in, as whom, and what a refusal looks like."""

from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from proxy.config import Config, Key
from proxy.core.reject import Reject
from proxy.downstream.auth import authenticate, hash_token, matches, new_token, require_admin

Ask = Callable[..., Awaitable[dict[str, object]]]
WEBUI, ADMIN = new_token(), new_token()
KEYS = (
    Key("webui", hash_token(WEBUI), trusted=True, max_output_tokens=99),
    Key("admin", hash_token(ADMIN), admin=True),
)


def _app(config: Config) -> web.Application:
    async def who(request: web.Request) -> web.Response:
        try:
            caller = authenticate(request, config)
        except Reject as reject:
            return web.json_response(reject.body() | {"status": reject.status, "headers": dict(reject.headers)})
        return web.json_response({name: getattr(caller, name) for name in caller.__slots__ if name != "limit"})

    app = web.Application()
    app.router.add_get("/{path:.*}", who)
    return app


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    """Ask a small app who is calling: `await ask(config, "/path", [(header, value)])`."""
    runners: list[web.AppRunner] = []

    async def asked(config: Config, path: str = "/", headers: list[tuple[str, str]] | None = None) -> dict[str, object]:
        runner = web.AppRunner(_app(config))
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers or []) as response:
            answer: dict[str, object] = await response.json()
            return answer

    yield asked
    for runner in runners:
        await runner.cleanup()


async def test_without_keys_a_caller_on_this_machine_is_trusted(ask: Ask) -> None:
    caller = await ask(Config())
    assert caller == {
        "name": "local", "authenticated": False, "trusted": True, "admin": True, "max_output_tokens": None,
    }  # fmt: skip


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
async def test_without_keys_a_caller_behind_another_proxy_is_nobody(ask: Ask, header: str) -> None:
    """A reverse proxy on this machine must not make the whole world local."""
    caller = await ask(Config(), "/", [(header, "203.0.113.9")])
    assert (caller["name"], caller["trusted"], caller["admin"]) == ("anonymous", False, False)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_key_names_its_caller_with_its_marks(ask: Ask, scheme: str) -> None:
    caller = await ask(Config(keys=KEYS), "/", [("Authorization", f"{scheme} {WEBUI}")])
    assert caller == {
        "name": "webui", "authenticated": True, "trusted": True, "admin": False, "max_output_tokens": 99,
    }  # fmt: skip
    assert (await ask(Config(keys=KEYS), "/", [("Authorization", f"{scheme} {ADMIN}")]))["admin"] is True


async def test_clients_of_messages_may_send_x_api_key_and_others_may_not(ask: Ask) -> None:
    assert (await ask(Config(keys=KEYS), "/v1/messages", [("x-api-key", WEBUI)]))["name"] == "webui"
    assert (await ask(Config(keys=KEYS), "/v1/models", [("x-api-key", WEBUI)]))["status"] == 401


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer ")],
        [("Authorization", WEBUI)],
        [("Authorization", f"Basic {WEBUI}")],
        [("Authorization", f"Bearer {WEBUI}x")],
        [("Authorization", f"Bearer {KEYS[0].hash}")],
        [("Authorization", "Bearer \xe9\xe8")],
        [("Authorization", f"Bearer {WEBUI}"), ("Authorization", f"Bearer {ADMIN}")],
        [("X-Forwarded-For", "127.0.0.1")],
    ],
)
async def test_a_wrong_or_missing_key_is_refused_in_openais_shape(ask: Ask, headers: list[tuple[str, str]]) -> None:
    answer = await ask(Config(keys=KEYS), "/v1/models", headers)
    assert answer["status"] == 401 and answer["headers"] == {"WWW-Authenticate": "Bearer"}
    error = answer["error"]
    assert isinstance(error, dict) and set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_api_key" and WEBUI not in error["message"]


async def test_every_key_is_compared_wherever_the_right_one_stands(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """No early exit: the time must not tell which key it was."""
    compared: list[str] = []

    def counting(stored: str, token: str) -> bool:
        compared.append(stored)
        return matches(stored, token)

    monkeypatch.setattr("proxy.downstream.auth.matches", counting)
    for token in (WEBUI, ADMIN, "wrong"):
        compared.clear()
        await ask(Config(keys=KEYS), "/", [("Authorization", f"Bearer {token}")])
        assert compared == [key.hash for key in KEYS]


def test_a_hash_has_its_own_salt_and_matches_its_key_only() -> None:
    first, second = hash_token(WEBUI), hash_token(WEBUI)
    assert first != second and WEBUI not in first
    assert matches(first, WEBUI) and matches(second, WEBUI) and not matches(first, ADMIN)


def test_new_keys_are_long_and_differ() -> None:
    assert len({new_token() for _ in range(100)}) == 100 and len(new_token()) > 40


async def test_only_an_admin_passes_to_the_internal_routes() -> None:
    from proxy.downstream.auth import ANONYMOUS, LOCAL

    require_admin(LOCAL)
    with pytest.raises(Reject) as caught:
        require_admin(ANONYMOUS)
    assert caught.value.status == 403
