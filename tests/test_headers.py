"""Which headers cross."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from proxy.upstream.headers import downstream_headers, request_id, upstream_headers

HOSTILE = CIMultiDict(
    {
        "Host": "evil.example", "Connection": "close, X-Secret, TRACEPARENT", "X-Secret": "1", "TE": "trailers",
        "Upgrade": "h2c", "Proxy-Authorization": "Basic x", "X-Forwarded-For": "1.2.3.4", "Forwarded": "for=1.2.3.4",
        "Cookie": "s=1", "Accept-Encoding": "gzip", "X-Request-Id": "r1", "Authorization": "Bearer client",
        "X-data-parallel-rank": "3", "Content-Length": "9", "Transfer-Encoding": "chunked", "traceparent": "00-a-b-01",
        "tracestate": "v=1", "X-OpenWebUI-User-Id": "u", "Expect": "100-continue", "User-Agent": "sdk", "Accept": "*/*",
        "Content-Type": "text/plain", "Content-Encoding": "gzip",
    }
)  # fmt: skip


def test_only_what_vllm_can_use_goes_up() -> None:
    """Its own key, our spelling of the type, no compression; what Connection names ends here."""
    assert upstream_headers(HOSTILE, request_id="r2", api_key="own") == {
        "Accept": "*/*",
        "User-Agent": "sdk",
        "tracestate": "v=1",
        "Accept-Encoding": "identity",
        "X-Request-Id": "r2",
        "Content-Type": "application/json",
        "Authorization": "Bearer own",
    }


def test_without_a_key_of_its_own_none_goes_up() -> None:
    """Least of all the client's."""
    assert "Authorization" not in upstream_headers(HOSTILE, request_id="r", api_key=None)


@pytest.mark.parametrize("value", ["a\r\nX: 1", "\udce9", "é", "x" * 5000, "\x00"])
def test_values_that_cannot_be_written_again_are_dropped(value: str) -> None:
    """Rather than failing the request."""
    headers = CIMultiDict({"User-Agent": value, "X-Note": value})
    assert "User-Agent" not in upstream_headers(headers, request_id="r", api_key=None)
    assert list(downstream_headers(headers, request_id="r")) == ["X-Request-Id"]


def test_only_what_concerns_the_client_comes_down() -> None:
    """Nothing of the hop to vLLM, nothing that steers a server between, and the exchange's id once."""
    answered = CIMultiDict(
        {
            "Content-Type": "application/json", "Cache-Control": "no-store", "Retry-After": "3", "Server": "uvicorn",
            "Connection": "keep-alive, X-Gone", "X-Gone": "1", "Keep-Alive": "timeout=5", "Set-Cookie": "a=b",
            "Transfer-Encoding": "chunked", "Content-Length": "5", "Content-Encoding": "gzip", "Date": "today",
            "X-Request-Id": "theirs", "openai-processing-ms": "5", "x-ratelimit-limit-requests": "9",
            "X-Accel-Redirect": "/etc", "X-Prefix-Proxy-Trail": "forged", "Trailer": "x", "Location": "/",
        }
    )  # fmt: skip
    answered.add("x-ratelimit-limit-requests", "10")
    down = downstream_headers(answered, request_id="ours")
    assert sorted((name.lower(), value) for name, value in down.items()) == [
        ("cache-control", "no-store"), ("content-type", "application/json"), ("openai-processing-ms", "5"),
        ("retry-after", "3"), ("x-ratelimit-limit-requests", "10"), ("x-ratelimit-limit-requests", "9"),
        ("x-request-id", "ours"),
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["r1", "a" * 128, "A-b_c.d:9"])
def test_a_safe_request_id_is_passed_on(value: str) -> None:
    """vLLM puts it into its own id."""
    assert request_id(value) == value


@pytest.mark.parametrize("value", [None, "", "a" * 129, "a b", "a\n", "é", "<x>"])
def test_an_unsafe_request_id_is_replaced(value: str | None) -> None:
    """It stands in logs and in vLLM's answers."""
    assert request_id(value) != value
    assert request_id(value) != request_id(value)


@given(st.text(max_size=200))
def test_whatever_comes_an_id_is_short_and_plain(value: str) -> None:
    """Its alphabet is a closed one."""
    made = request_id(value)
    assert 1 <= len(made) <= 128 and made.isascii() and made.isprintable() and " " not in made
