"""The app as a whole: what is served and what is not, whatever the bytes that ask."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from yarl import URL

from proxy.app import build_app
from proxy.config import Config, Key
from proxy.downstream.auth import hash_token
from proxy.downstream.listener import Runner
from proxy.state import STATE
from tests.conftest import RawConnect, RunningProxy, StartProxy
from tests.fake_vllm import FakeVllm

UNSERVED = (
    "/invocations", "/reset_prefix_cache", "/sleep", "/collective_rpc", "//invocations", "/v1/../invocations",
    "/v1/%2e%2e/invocations", "/V1/chat/completions/../../metrics", "/v1;x/../metrics", "/v1/%2e%2e/metrics",
    "//metrics", "/metrics;x", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/chat/completions/render",
    "/v1/chat/completions/batch", "/docs", "/openapi.json", "/v1", "/v1/", "/%2e%2e%2f", "/v1/models%2f..%2fx/..",
)  # fmt: skip
BACKGROUND = {"/v1/models", "/metrics", "/health"}  # what the proxy itself asks vLLM


@pytest.mark.parametrize("path", UNSERVED)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_what_is_not_on_the_list_is_404_and_reaches_no_upstream(
    start_proxy: StartProxy, start_vllm: Callable[..., Awaitable[FakeVllm]], method: str, path: str
) -> None:
    """vLLM guards only a few of its paths, so the proxy lets through none but its own."""
    vllm = await start_vllm(dev_mode=True)
    proxy = await start_proxy(upstream__url=vllm.url, keys=(Key("ui", hash_token("sk-ui")),))
    for headers in ({}, {"Authorization": "Bearer sk-ui"}):
        url = URL(proxy.url + path, encoded=True)
        async with proxy.session.request(method, url, headers=headers, allow_redirects=False) as answer:
            assert (answer.status in (401, 404), answer.content_type) == (True, "application/json")
            assert set((await answer.json())["error"]) == {"message", "type", "param", "code"}
    assert {seen.path for seen in vllm.seen if seen.method == "POST" or seen.path not in BACKGROUND} == set()


@pytest.mark.parametrize("path", ["/v1//models", "/v1/models/", "/models", "/v1/v1/models", "/v1/m%6fdels"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_near_miss_names_the_right_path_and_never_redirects(
    proxy: RunningProxy, method: str, path: str
) -> None:
    """A redirect turns a POST into a GET, and an HTML page tells a user nothing."""
    url = URL(proxy.url + path, encoded=True)
    async with proxy.session.request(method, url, allow_redirects=False) as answer:
        assert (answer.status, answer.content_type) == (404, "application/json")
        assert "Did you mean /v1/models?" in (await answer.json())["error"]["message"]


async def test_a_wrong_method_is_405_and_names_the_right_ones(proxy: RunningProxy) -> None:
    """With Allow, as the standard asks."""
    async with proxy.session.get(proxy.url + "/v1/chat/completions") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        assert (await answer.json())["error"]["code"] == "method_not_allowed"
    async with proxy.session.put(proxy.url + "/v1/models") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("target", ["/v1/models", "vllm:8000", "127.0.0.1:80"])
async def test_connect_opens_no_tunnel(proxy: RunningProxy, raw_connect: RawConnect, target: str) -> None:
    """The proxy is no proxy of that kind."""
    client = await raw_connect(proxy.port)
    await client.send(f"CONNECT {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert (await client.head()).startswith(b"HTTP/1.1 404 ")


async def test_an_upgrade_that_is_not_offered_is_ignored(proxy: RunningProxy, raw_connect: RawConnect) -> None:
    """Java's HTTP client offers h2c with every request."""
    client = await raw_connect(proxy.port)
    await client.post(b"{}", "/v1/embeddings", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n")
    assert (await client.head()).startswith(b"HTTP/1.1 200 ")


async def test_a_query_and_an_absolute_target_are_fine(proxy: RunningProxy, raw_connect: RawConnect) -> None:
    """Both are ordinary HTTP."""
    async with proxy.session.get(proxy.url + "/v1/models?x=1") as answer:
        assert answer.status == 200
    client = await raw_connect(proxy.port)
    await client.send(b"GET http://proxy.example/v1/models HTTP/1.1\r\nHost: proxy.example\r\n\r\n")
    assert (await client.head()).startswith(b"HTTP/1.1 200 ")


async def test_cleanup_ends_every_task_and_connection(fake_vllm: FakeVllm, caplog: pytest.LogCaptureFixture) -> None:
    """A closed app leaves nothing running and has nothing to complain of."""
    app = build_app(Config().with_values({"upstream.url": fake_vllm.url}))
    runner = Runner(app)
    await runner.setup()
    await asyncio.sleep(0.05)
    assert len(app[STATE].tasks) > 0
    await runner.cleanup()
    assert len(app[STATE].tasks) == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
