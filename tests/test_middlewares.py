"""What every request passes on its way in, and every answer on its way out."""

import asyncio
import logging

import pytest

from proxy.downstream.middlewares import MIDDLEWARES
from tests.conftest import RawConnect, RunningProxy, StartProxy


def test_the_order_is_the_one_that_the_comment_gives_reasons_for() -> None:
    """A key is asked for last of all, errors are turned into answers outside of everything that raises them."""
    names = [middleware.__name__ for middleware in MIDDLEWARES]
    assert names == ["counted", "answered", "preflighted", "exact", "accepting", "authenticated"]


@pytest.mark.parametrize("given", ["r-1", "a" * 128, "a" * 129, "with space", "é", ""])
async def test_every_answer_has_a_request_id(proxy: RunningProxy, given: str) -> None:
    """The client's own where it is safe to repeat, else a new one."""
    for path in ("/health", "/v1/nothing", "/v1/models"):
        async with proxy.session.get(proxy.url + path, headers={"X-Request-Id": given}) as answer:
            got = answer.headers["X-Request-Id"]
            assert got == given if given in ("r-1", "a" * 128) else len(got) == 32


async def test_what_the_relay_does_not_log_is_logged_without_any_text_of_the_client(
    proxy: RunningProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """One line an exchange; health checks would only hide the rest."""
    caplog.set_level(logging.INFO, "proxy.access")
    for path in ("/health", "/secret-path", "/v1/embeddings"):
        async with proxy.post({"input": "secret words"}, path) as answer:
            await answer.read()
    async with proxy.post(b"secret nonsense") as answer:
        assert answer.status == 400
    lines = [vars(record) for record in caplog.records if record.name == "proxy.access"]
    told = [(line["route"], line["status"], line["outcome"]) for line in lines]
    assert told == [
        ("unmatched", 404, "rejected"),
        ("/v1/embeddings", 200, "completed"),
        ("/v1/chat/completions", 400, "rejected"),
    ]
    assert "secret" not in str(lines)


async def test_a_fault_of_our_own_is_500_json_without_its_text(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The user sees that it was the proxy; only the log has class and place."""
    proxy = await start_proxy()

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("sk-secret")

    proxy.state.upstream.send = broken  # type: ignore[method-assign,assignment]  # a fault that nobody foresaw
    async with proxy.post({}, "/v1/embeddings") as answer:
        assert (answer.status, answer.content_type) == (500, "application/json")
        assert "sk-secret" not in await answer.text()
    assert "sk-secret" not in caplog.text
    assert [vars(record)["error"] for record in caplog.records if record.name == "proxy.errors"] == ["RuntimeError"]
    assert proxy.sample("proxy_requests_total", outcome="failed", status="500") == 1


async def test_a_stream_to_an_old_client_that_keeps_connections_ends_with_its_connection(
    proxy: RunningProxy, raw_connect: RawConnect
) -> None:
    """HTTP/1.0 knows no chunks: a client that said `keep-alive` would otherwise wait for an end that never shows."""
    client = await raw_connect(proxy.port)
    body = b'{"model":"fake","stream":true,"messages":[{"role":"user","content":"hi"}]}'
    head = f"POST /v1/chat/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
    await client.send(head.encode() + body)
    assert b"Connection: close\r\n" in await client.head()
    async with asyncio.timeout(5):
        assert (await client.rest()).endswith(b"data: [DONE]\n\n")
