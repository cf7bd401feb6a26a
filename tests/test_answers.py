"""What a client gets of an answer that came in one piece."""

import json

import pytest

from proxy.downstream.answers import empty_answer, plain_answer

JSON = "application/json"
GOOD = b'{"id":"x","choices":[]}'


def told(status: int, content_type: str, body: bytes) -> tuple[int, str | None, object]:
    plain = plain_answer(status, content_type, body)
    assert plain.own
    error = json.loads(plain.body)["error"]
    assert error["type"] == "server_error" and error["code"] == plain.status
    return plain.status, plain.failure, error["message"]


@pytest.mark.parametrize("body", [GOOD, b' \n{"a":1}', b'{"logprob":-Infinity}', b'{"error":{"message":"x"}}', b"[]"])
def test_json_of_a_good_answer_stays_as_it_came(body: bytes) -> None:
    """Also numbers that orjson refuses, and an error under status 200."""
    plain = plain_answer(200, JSON, body)
    assert (plain.status, plain.body, plain.failure, plain.own) == (200, body, None, False)


def test_json_under_another_type_is_json() -> None:
    """Some servers forget the type."""
    assert plain_answer(200, "application/octet-stream", GOOD).failure is None


@pytest.mark.parametrize(("content_type", "body"), [("text/html", b"<html>"), (JSON, b""), (JSON, b"ok"), ("", b"{")])
def test_a_good_status_without_json_is_502(content_type: str, body: bytes) -> None:
    """Half a body would look like an answer."""
    status, failure, message = told(200, content_type, body)
    assert (status, failure) == (502, "not_json") and message


@pytest.mark.parametrize("status", [301, 302, 307, 304, 101])
def test_a_redirect_is_502(status: int) -> None:
    """Its target is not shown."""
    assert told(status, JSON, b'{"error":{"message":"http://inner"}}')[:2] == (502, "other")


def test_an_error_in_the_right_shape_stays_as_it_came() -> None:
    """With its status."""
    body = b'{"error":{"message":"too long","type":"BadRequestError","param":"x","code":400}}'
    plain = plain_answer(400, JSON, body)
    assert (plain.status, plain.body, plain.failure, plain.own) == (400, body, "status_4xx", False)


@pytest.mark.parametrize(
    ("status", "content_type", "body", "message"),
    [
        (401, JSON, b'{"error":"Unauthorized"}', "Unauthorized"),
        (404, JSON, b'{"detail":"Not Found"}', "Not Found"),
        (500, JSON, b'{"object":"error","message":"boom"}', "boom"),
        (500, "text/event-stream", b'data: {"error":{"message":"boom"}}\n\ndata: [DONE]\n\n', "boom"),
        (500, "text/event-stream", b'data: {"error":{"message":"boom"}}', "boom"),
        (500, "text/event-stream", b'{"error":{"message":"boom"}}', "boom"),
        (400, JSON, b'{"error":{"message":"' + b"x" * 900 + b'"', None),
        (400, JSON, b'{"error":{"message":""}}', None),
        (400, JSON, b'{"detail":[{"msg":"x"}]}', None),
        (502, "text/html", b"<html>Bad gateway</html>", None),
        (500, "text/plain", b"Internal Server Error", None),
        (503, "", b"", None),
        (500, "text/event-stream", b": nothing\n\ndata: [1]\n\ndata: {}\n\n", None),
    ],
)
def test_any_other_error_gets_the_right_shape(status: int, content_type: str, body: bytes, message: str | None) -> None:
    """The sentence is kept where there is one; markup is not shown to users."""
    got, failure, said = told(status, content_type, body)
    assert (got, failure) == (status, "status_4xx" if status < 500 else "status_5xx")
    assert said == (message or f"The model server answered with status {status} and no message.")


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_an_empty_answer_has_the_shape_of_a_full_one(chat: bool, streams: bool) -> None:
    """As vLLM writes it, so that every SDK takes it; usage where the client asked for it."""
    rest = {"stream": streams, "stream_options": {"include_usage": True}}
    headers, plain, stream = empty_answer("m", rest, chat=chat, id="x", created=7)
    events = [json.loads(line[6:]) for line in stream.decode().split("\n\n")[:-2]] if streams else []
    bodies = events if plain is None else [json.loads(plain.body)]
    kind = "chat.completion" + (".chunk" if streams else "") if chat else "text_completion"
    assert {body["object"] for body in bodies} == {kind} and {body["created"] for body in bodies} == {7}
    choice = bodies[0]["choices"][0]
    said = (choice["delta"] if streams else choice["message"])["content"] if chat else choice["text"]
    assert (said, choice["finish_reason"]) == ("", "stop")
    assert bodies[-1]["usage"]["completion_tokens"] == 0 and len(bodies) == (2 if streams else 1)
    assert stream.endswith(b"data: [DONE]\n\n") == streams and headers["x-should-retry"] == "false"
