"""Errors: OpenAI's shape always, and nothing of anybody's text in them."""

import logging

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from proxy.core.reject import Reject
from proxy.downstream.errors import (
    after_start,
    from_http_error,
    place_of,
    reject_response,
    unexpected_response,
    upstream_error_body,
)

SECRET = "sk-secret and what the user wrote"


def body_of(response: web.Response) -> dict[str, object]:
    assert isinstance(response.body, bytes)
    error = orjson.loads(response.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def test_a_reject_becomes_its_answer() -> None:
    """Status, headers and every field arrive."""
    response = reject_response(Reject(413, "Too large.", param="messages", code="big", headers={"Connection": "close"}))
    assert (response.status, response.content_type, response.keep_alive) == (413, "application/json", False)
    assert body_of(response) == {
        "message": "Too large.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "big",
    }


def test_an_unexpected_exception_tells_its_class_and_place_to_the_log_and_its_text_to_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The text of a foreign exception may quote a request."""
    try:
        reject_response(SECRET)  # type: ignore[arg-type]  # a fault inside the package
    except AttributeError as error:
        error.args = (SECRET,)
        response = unexpected_response(error)
    record = caplog.records[-1]
    assert (record.levelno, vars(record)["error"]) == (logging.ERROR, "AttributeError")
    assert vars(record)["where"].startswith("errors.py:")
    assert response.status == 500 and body_of(response)["code"] == "internal_error"
    assert SECRET not in str(response.body) and SECRET not in str(vars(record))


def test_an_exception_that_was_never_raised_has_no_place() -> None:
    """Nothing to tell is no reason to fail again."""
    assert place_of(ValueError(SECRET)) == ""


def test_what_aiohttp_raises_by_itself_gets_our_shape() -> None:
    """Its own answers are plain text, some are redirects."""
    refused = from_http_error(web.HTTPMethodNotAllowed("GET", ["POST"]))
    assert isinstance(refused, web.Response)
    assert (refused.status, refused.headers["Allow"], body_of(refused)["type"]) == (
        405,
        "POST",
        "invalid_request_error",
    )
    moved = from_http_error(web.HTTPMovedPermanently("/elsewhere"))
    assert moved.status == 404 and "Location" not in moved.headers


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b"<html>502</html>", "404"),
        (b"", "404"),
        (b"[1]", "404"),
    ],
)
def test_other_shapes_of_the_upstream_are_translated(raw: bytes, told: str) -> None:
    """vLLM has three, and what stands between has its own."""
    body = upstream_error_body(raw, 404)
    assert body is not None and told in str(body["error"])


def test_an_error_in_openais_shape_stays_as_it_is() -> None:
    """Its bytes are passed on."""
    assert upstream_error_body(b'{"error":{"message":"m"}}', 400) is None


async def test_a_failure_after_a_complete_answer_leaves_it_and_its_connection_alone() -> None:
    """The client has all that it asked for; only the log needs to know."""

    class Complete(web.StreamResponse):
        @property
        def body_length(self) -> int:
            return 10

    complete = Complete()
    assert await after_start(make_mocked_request("GET", "/"), complete) is complete
    assert complete.keep_alive is None
