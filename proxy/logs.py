"""Logs on stderr: JSON or for the console, one line per exchange, and never text of users, keys or header values.

Modules log with `logging.getLogger("proxy.…")`, a constant event name and `extra={...}`.  What other libraries log is
reduced to where it came from: their messages may quote a request.
"""

import contextlib
import logging
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import PurePath
from types import TracebackType
from typing import Any, TextIO

import structlog

from proxy.config.groups import Log

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_FRAMES = 12  # the innermost ones tell where it failed
_access = logging.getLogger("proxy.access")

Event = MutableMapping[str, Any]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def access(
    *,
    request_id: str,
    route: str,
    status: int,
    outcome: str,
    model: str,
    seconds: float,
    trail: Sequence[str] = (),
    tokens: Mapping[str, int | None] | None = None,
    first_token_seconds: float | None = None,
    caller: str | None = None,
) -> None:
    """Log the one line of an exchange.  `route`, `outcome`, `model` and `caller` are labels of ours, never the client's
    words; `tokens` maps prompt, cached and completion to counts."""
    fields: dict[str, object] = {
        "request_id": request_id if _REQUEST_ID.fullmatch(request_id) else "unprintable",
        "route": route,
        "status": status,
        "outcome": outcome,
        "model": model,
        "seconds": round(seconds, 4),
        "trail": ",".join(trail),
        "first_token_seconds": None if first_token_seconds is None else round(first_token_seconds, 4),
        "caller": caller,
        **{f"{name}_tokens": count for name, count in (tokens or {}).items()},
    }
    _access.info("exchange", extra={name: value for name, value in fields.items() if value not in (None, "")})


class _Handler(logging.StreamHandler[TextIO]):
    """A handler that does not print what it could not log: the standard one prints the arguments then."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say that a line was lost and where it came from, if that can still be written."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(f"a log line was lost: {record.module}.{record.funcName}:{record.lineno}\n")


def configure(settings: Log, stream: TextIO | None = None) -> None:
    """Send all logs of the process to `stream` (stderr), as the settings say.  Replaces earlier handlers."""
    stream = sys.stderr if stream is None else stream
    handler = _Handler(stream)
    handler.setFormatter(_formatter(settings, stream))
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Other libraries' debug lines hold statements and bodies (aiosqlite logs every call with its values).
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("proxy").setLevel(level)


def _formatter(settings: Log, stream: TextIO) -> logging.Formatter:
    render: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if settings.format == "json":
        render.append(structlog.processors.JSONRenderer())
    else:
        render.append(structlog.dev.ConsoleRenderer(colors=stream.isatty(), sort_keys=False))
    return structlog.stdlib.ProcessorFormatter(
        processors=render,
        foreign_pre_chain=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            _without_texts,
        ],
        # The standard formatter would print what is kept here, texts and all.
        keep_exc_info=False,
        keep_stack_info=False,
    )


def _without_texts(_logger: object, _method: str, event: Event) -> Event:
    """Replace exceptions by class and place, and the messages of other libraries by their place."""
    record: logging.LogRecord = event["_record"]
    if record.name != "proxy" and not record.name.startswith("proxy."):
        kept = {name: event[name] for name in ("timestamp", "level", "logger", "_record", "_from_structlog")}
        kept["exc_info"] = event.get("exc_info")
        event = {**kept, "event": "other_library", "at": f"{record.module}.{record.funcName}:{record.lineno}"}
    event.pop("stack_info", None)
    exc_info = event.pop("exc_info", None)
    if exc_info:
        event.update(_failure(exc_info))
    return event


def _failure(exc_info: ExcInfo) -> dict[str, object]:
    kind, _, trace = exc_info
    places = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{PurePath(code.co_filename).name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return {"error": kind.__name__ if kind else "unknown", "trace": " > ".join(places[-_FRAMES:])}
