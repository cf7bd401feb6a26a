"""CORS as browsers' direct connections need it, and none of it unless it was configured."""

import pytest

from proxy.config import Key
from proxy.downstream.auth import hash_token
from tests.conftest import RunningProxy, StartProxy

UI, EVIL = "https://ui.example", "https://evil.example"
WANTED = "authorization,content-type,x-stainless-lang,x-stainless-retry-count,user-agent"
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": WANTED}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def open_to_ui(start_proxy: StartProxy) -> RunningProxy:
    """A proxy with a key, open to one origin."""
    keys = (Key("ui", hash_token("sk-right")),)
    return await start_proxy(cors__origins=(UI,), keys=keys, limits__body_bytes=2048)


async def test_a_preflight_needs_no_key_and_gets_every_header_that_it_asked_for(open_to_ui: RunningProxy) -> None:
    """A wildcard would not cover Authorization, and SDKs send headers of their own."""
    url = open_to_ui.url + CHAT
    async with open_to_ui.session.options(url, headers={"Origin": UI, **ASK}) as answer:
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == UI
        assert answer.headers["Access-Control-Allow-Headers"] == WANTED
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert answer.headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in answer.headers


async def test_another_origin_is_told_nothing(open_to_ui: RunningProxy) -> None:
    """Its browser then refuses by itself."""
    url = open_to_ui.url + CHAT
    for method in ("OPTIONS", "POST"):
        async with open_to_ui.session.request(method, url, headers={"Origin": EVIL, **ASK}) as answer:
            assert not [name for name in answer.headers if name.lower().startswith("access-control-")]
            # A cache must not give this answer to the right origin.
            assert answer.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    ("path", "key", "body", "status"),
    [
        (CHAT, "sk-wrong", b"{}", 401),
        ("/v1/embeddings", "sk-right", b"x" * 3000, 413),
        ("/v1/embeddings", "sk-right", b"{}", 200),
        ("/v1/nothing", "sk-right", b"{}", 404),
        ("/v1/models", "sk-right", b"{}", 405),
    ],
)
async def test_errors_carry_the_same_headers(
    open_to_ui: RunningProxy, path: str, key: str, body: bytes, status: int
) -> None:
    """Without them a browser shows "failed to fetch" in place of the reason."""
    headers = {"Origin": UI, "Authorization": f"Bearer {key}"}
    async with open_to_ui.session.post(open_to_ui.url + path, data=body, headers=headers) as answer:
        assert answer.status == status
        assert answer.headers["Access-Control-Allow-Origin"] == UI
        assert answer.headers["Vary"] == "Origin"
        assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]


async def test_without_configuration_there_is_no_cors(proxy: RunningProxy) -> None:
    """A preflight is then a wrong method like any other."""
    async with proxy.session.options(proxy.url + "/v1/embeddings", headers={"Origin": UI, **ASK}) as answer:
        assert answer.status == 405
        assert not [name for name in answer.headers if name.lower().startswith(("access-control-", "vary"))]


async def test_a_star_allows_any_origin(start_proxy: StartProxy) -> None:
    """No cookies are used, so the star itself may be the answer."""
    proxy = await start_proxy(cors__origins=("*",))
    async with proxy.session.get(proxy.url + "/v1/models", headers={"Origin": EVIL}) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "Vary" not in answer.headers


@pytest.mark.parametrize("wanted", ["", "a" * 5000, "x y", "ok, <script>"])
async def test_what_is_no_list_of_header_names_is_not_echoed(open_to_ui: RunningProxy, wanted: str) -> None:
    """The echo is bounded and holds names only."""
    headers = {"Origin": UI, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
    async with open_to_ui.session.options(open_to_ui.url + CHAT, headers=headers) as answer:
        assert answer.status == 204
        assert "Access-Control-Allow-Headers" not in answer.headers
