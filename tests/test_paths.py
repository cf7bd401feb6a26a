"""Paths: what is compared, and what a near miss is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.downstream.paths import not_found_message, raw_path, suggestion

KNOWN = ("/v1/models", "/v1/chat/completions", "/tokenize", "/health", "/", "/v1/models/{model}")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v1/models?x=/y", "/v1/models"),
        ("http://host:1/v1/models?x", "/v1/models"),
        ("http://host", "/"),
        ("//models", "//models"),
        ("/v1/%2e%2e/x", "/v1/%2e%2e/x"),
        ("/a/http://b/c", "/a/http://b/c"),
        ("*", "*"),
    ],
)
def test_the_raw_path_is_what_was_sent_without_query_and_origin(target: str, path: str) -> None:
    """Decoding or joining first would let two spellings name one route."""
    assert raw_path(target) == path


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/models", "/v1/models"),
        ("/v1//models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/v1/v1/models", "/v1/models"),
        ("/V1/Models", "/v1/models"),
        ("/v1/m%6fdels", "/v1/models"),
        ("/v1;x/models", "/v1/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/health", "/health"),
        ("/v1/../models", None),
        ("/v1/%2e%2e/models", None),
        ("/v1/%252e%252e/models", None),
        ("/invocations", None),
        ("/", None),
        ("/v1", None),
        ("/" + "v1/" * 400 + "models", None),
    ],
)
def test_a_slip_is_told_the_right_path_and_a_climb_is_not(path: str, meant: str | None) -> None:
    """A wrong base URL is the first mistake that anyone makes."""
    assert suggestion(path, KNOWN) == meant


@given(st.text(max_size=600))
def test_any_path_gets_a_message_that_quotes_only_paths_of_ours(path: str) -> None:
    """What a client wrote never comes back in an error."""
    message = not_found_message("/" + path + "zq", KNOWN)
    assert message == not_found_message("/zq", KNOWN)
