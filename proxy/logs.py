"""Logs on stderr: JSON or for the console, one line per exchange, and never text of users, keys or header values.

Modules log with `logging.getLogger("proxy.…")`, a constant event name and `extra={...}`.  What other libraries log is
reduced to where it came from: their messages may quote a request.
"""

import contextlib
import json
import logging
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from types import TracebackType
from typing import Any, TextIO

import structlog

from proxy.config.groups import Log

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_BARE = re.compile(r"[^\s=\"'\x00-\x1f\x7f]+")
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
    if not _access.isEnabledFor(logging.INFO):
        return
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
    # What `info(..., extra=...)` does, without looking for the calling line: this is paid by every exchange.
    record = logging.LogRecord(_access.name, logging.INFO, __file__, 0, "exchange", (), None, "access")
    record.__dict__.update((name, value) for name, value in fields.items() if value is not None and value != "")
    _access.handle(record)


_EXCHANGE = (
    "request_id", "route", "status", "outcome", "model", "seconds", "trail", "first_token_seconds", "caller",
    "prompt_tokens", "cached_tokens", "completion_tokens",
)  # fmt: skip


class _Formatter(structlog.stdlib.ProcessorFormatter):
    """Writes the line of an exchange by itself, in a fifth of the time: it is the only one that comes by thousands."""

    as_json = False
    plain = False  # colours are structlog's own

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        if record.name != _access.name or not (self.as_json or self.plain):
            return super().format(record)
        held = record.__dict__
        fields = {name: held[name] for name in _EXCHANGE if name in held}
        timestamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")[:-6] + "Z"
        if self.as_json:
            head = {"event": "exchange", "timestamp": timestamp, "level": "info", "logger": record.name}
            return json.dumps({**head, **fields})
        told = " ".join(f"{name}={_bare(value)}" for name, value in fields.items())
        return f"{timestamp} [info     ] {'exchange':30} [{record.name}] {told}"


def _bare(value: object) -> object:
    return value if not isinstance(value, str) or _BARE.fullmatch(value) else repr(value)


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
    formatter = _Formatter(
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
    formatter.as_json, formatter.plain = settings.format == "json", not stream.isatty()
    return formatter


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
