"""Logs: one line per exchange, in both forms, and no text that came with a request."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from aiohttp import ClientSession, web

from proxy import logs
from proxy.config.groups import Log

CANARY = "CANARY-TEXT-7f"


@pytest.fixture
def restored() -> Iterator[None]:
    """Give the process its own logging back after the test."""
    root, own = logging.getLogger(), logging.getLogger("proxy")
    kept = (root.handlers[:], root.level, own.level)
    yield
    root.handlers[:], root.level, own.level = kept[0], kept[1], kept[2]
    logging.getLogger().manager._clear_cache()  # type: ignore[attr-defined]  # levels were set past setLevel


@pytest.fixture
def stream(restored: None) -> io.StringIO:
    """Where the logs of a test go, as JSON at debug level."""
    stream = io.StringIO()
    logs.configure(Log("json", "debug"), stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    """Return the logged lines."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def _exchange(request_id: str = "r-1") -> None:
    logs.access(
        request_id=request_id, route="/v1/chat/completions", status=200, outcome="completed", model="m",
        seconds=1.23456, trail=("keep_tools", "salt"), tokens={"prompt": 9, "cached": None, "completion": 2},
    )  # fmt: skip


def test_an_exchange_is_one_line_with_its_facts(stream: io.StringIO) -> None:
    _exchange()
    (line,) = lines(stream)
    assert line.pop("timestamp")
    assert line == {
        "event": "exchange", "level": "info", "logger": "proxy.access", "request_id": "r-1", "status": 200,
        "route": "/v1/chat/completions", "outcome": "completed", "model": "m", "seconds": 1.2346,
        "trail": "keep_tools,salt", "prompt_tokens": 9, "completion_tokens": 2,
    }  # fmt: skip


def test_the_console_form_is_one_line_too(restored: None) -> None:
    stream = io.StringIO()
    logs.configure(Log("console", "info"), stream)
    _exchange()
    assert len(stream.getvalue().splitlines()) == 1 and "keep_tools" in stream.getvalue()


def test_a_request_id_with_odd_characters_is_not_logged(stream: io.StringIO) -> None:
    _exchange("a b\n{}")
    assert lines(stream)[0]["request_id"] == "unprintable"


def test_the_level_of_the_settings_holds(restored: None) -> None:
    stream = io.StringIO()
    logs.configure(Log("json", "warning"), stream)
    _exchange()
    logging.getLogger("proxy.store").warning("slow", extra={"seconds": 3})
    assert [line["event"] for line in lines(stream)] == ["slow"]


def test_an_exception_is_logged_by_class_and_place_without_its_text(stream: io.StringIO) -> None:
    try:
        raise ValueError(CANARY)
    except ValueError:
        logging.getLogger("proxy.chat").exception("step_failed", extra={"step": "salt"})
    (line,) = lines(stream)
    assert (line["event"], line["step"], line["error"]) == ("step_failed", "salt", "ValueError")
    assert "test_logs.py" in str(line["trace"]) and CANARY not in stream.getvalue()


@pytest.mark.parametrize("form", ["json", "console"])
def test_the_words_of_other_libraries_are_reduced_to_their_place(form: str, restored: None) -> None:
    stream = io.StringIO()
    logs.configure(Log(form, "debug"), stream)  # type: ignore[arg-type]  # both are allowed words
    other = logging.getLogger("aiosqlite")
    other.debug("executing %s", CANARY)
    other.error("failed on %s", CANARY, exc_info=ValueError(CANARY), stack_info=True, extra={"body": CANARY})
    assert len(stream.getvalue().splitlines()) == 1
    assert CANARY not in stream.getvalue() and "other_library" in stream.getvalue()
    assert "ValueError" in stream.getvalue() and "test_logs" in stream.getvalue()


def test_a_line_that_cannot_be_logged_is_not_printed_either(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    record = logging.LogRecord("proxy.x", logging.ERROR, __file__, 1, "%d", (CANARY,), None)
    next(one for one in logging.getLogger().handlers if type(one).__module__ == logs.__name__).handle(record)
    assert CANARY not in stream.getvalue() + capsys.readouterr().err and "lost" in stream.getvalue()


async def test_a_fault_in_a_handler_leaves_no_text_of_the_request_in_the_logs(stream: io.StringIO) -> None:
    """The server's own error line has a traceback; at debug level too, none of the request is in what is printed."""

    async def broken(request: web.Request) -> web.Response:
        raise RuntimeError(await request.text() + request.headers["Authorization"])

    app = web.Application()
    app.router.add_post("/", broken)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/?{CANARY}"
    async with ClientSession() as session:
        headers = {"Authorization": f"Bearer {CANARY}"}
        async with session.post(url, data=CANARY, headers=headers) as response:
            assert response.status == 500
    await runner.cleanup()
    assert "RuntimeError" in stream.getvalue() and CANARY not in stream.getvalue()
