"""Recording exchanges for `prefix-proxy explain`: a queue and a writer, so that no exchange ever waits for the disk."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from proxy.config import Config
from proxy.core.meter import Usage
from proxy.core.redact import Redactor
from proxy.core.text import digest

log = logging.getLogger("proxy.recorder")

QUEUED_BYTES = 64 * 1024 * 1024
_PLAIN_HEADERS = ("content-type", "user-agent", "accept")
_DATE = "%Y%m%d-%H%M%S"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One exchange.  Times are wall seconds; `headers` are only those that may be written."""

    at: float
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    sent: bytes
    first_at: float | None
    end_at: float
    status: int
    outcome: str
    model: str
    trail: tuple[str, ...]
    usage: Usage | None


class Recorder:
    """Writes exchanges into files of a folder.  `take` never waits: what does not fit into the queue is left out."""

    def __init__(self, config: Config, folder: Path, secret: bytes) -> None:
        """`secret`: what the pseudonyms of redacted text are made from."""
        settings, names = config.record, config.identity
        self._folder, self._file_bytes, self._files = folder, settings.file_bytes, settings.files
        self._redactor = Redactor(digest(secret, b"record")) if settings.redact else None
        self._ids = {h.lower() for h in (names.user_header, names.chat_header, names.message_header)}
        self._kept = {*_PLAIN_HEADERS, *self._ids, names.task_header.lower(), "idempotency-key", "x-request-id"}
        self._secret_headers = {"authorization", "cookie", "x-api-key", "proxy-authorization", names.jwt_header.lower()}
        self._queue: asyncio.Queue[Recorded | None] = asyncio.Queue()
        self._queued_bytes = self._left_out = self._number = 0
        self._path: Path | None = None
        self._size = 0

    def headers(self, given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """Return the headers that may be written: known ones, never one that carries a key."""
        kept = self._kept - self._secret_headers
        return tuple((name, value) for name, value in given.items() if name.lower() in kept)

    def take(self, exchange: Recorded) -> None:
        """Queue an exchange to be written."""
        size = len(exchange.body) + len(exchange.sent)
        if self._queued_bytes + size > QUEUED_BYTES:
            self._left_out += 1
            return
        self._queued_bytes += size
        self._queue.put_nowait(exchange)

    async def run(self) -> None:
        """Write what comes, until `close`; a disk that fails costs the record, not the proxy."""
        while (exchange := await self._queue.get()) is not None:
            await self._write(exchange)

    def close(self) -> None:
        """Have `run` return once all that is queued is written."""
        self._queue.put_nowait(None)

    async def _write(self, exchange: Recorded) -> None:
        self._queued_bytes -= len(exchange.body) + len(exchange.sent)
        try:
            await asyncio.to_thread(self._append, exchange)
        except Exception as error:
            self._path = None
            log.error("recording_failed", extra={"error": type(error).__name__})

    def _append(self, exchange: Recorded) -> None:
        self._number += 1
        line = orjson.dumps(self._line(exchange)) + b"\n"
        if self._path is None or self._size + len(line) > self._file_bytes:
            self._begin_file()
        assert self._path is not None
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(line)
        self._size += len(line)

    def _begin_file(self) -> None:
        """A new file with every start and when one is full; the oldest go."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"record-{time.strftime(_DATE, time.gmtime())}-{os.getpid()}-{self._number:08}.jsonl"
        self._path, self._size = self._folder / name, 0
        for old in sorted(self._folder.glob("record-*.jsonl"))[: -(self._files - 1) or None]:
            with suppress(FileNotFoundError):
                old.unlink()

    def _line(self, exchange: Recorded) -> dict[str, object]:
        usage = exchange.usage
        return {
            "n": self._number,
            "t": round(exchange.at, 4),
            "method": exchange.method,
            "path": exchange.path,
            "headers": [self._header(name, value) for name, value in exchange.headers],
            "body": self._text(exchange.body, exchange.model),
            "t_first": None if exchange.first_at is None else round(exchange.first_at, 4),
            "t_end": round(exchange.end_at, 4),
            "sent": None if exchange.sent == exchange.body else self._text(exchange.sent, exchange.model),
            "status": exchange.status,
            "outcome": exchange.outcome,
            "trail": exchange.trail,
            "usage": None
            if usage is None
            else {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
            },
            "redacted": self._redactor is not None,
        }

    def _header(self, name: str, value: str) -> list[str]:
        if self._redactor is None or name.lower() in _PLAIN_HEADERS:
            return [name, value]
        return [name, self._redactor.name(value) if name.lower() in self._ids else self._redactor.text(value)]

    def _text(self, body: bytes, model: str) -> str:
        if self._redactor is None:
            return body.decode("utf-8", "replace")
        return self._redactor.body(body, model=model)
