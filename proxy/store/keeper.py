"""The open file, or the reason why there is none: opened again when it failed, moved or was not to be had."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from proxy.store.db import Database
from proxy.store.faults import Kind, StoreError
from proxy.store.rows import SessionKey

log = logging.getLogger("proxy.store")

# A stuck disk must not hold a chat request: after this it goes on without its memory.
_READ_SECONDS = 1.0
T = TypeVar("T")


class FileKeeper:
    """Keeps one database open.  `read` may be called at any time, all else only by the one writer.

    `degraded` is None or one sentence that says why nothing is written, `notice` None or one that says what was wrong
    with an earlier file, `refused` that the file is not ours and not tried again, `doubted` that it is to be opened
    anew.
    """

    def __init__(
        self,
        opener: Callable[[], Awaitable[Database]],
        *,
        on_failure: Callable[[Kind], None],
        on_open: Callable[[list[tuple[SessionKey, float]]], None],
    ) -> None:
        self.degraded: str | None = None
        self.notice: str | None = None
        self.failures = 0
        self.refused = False
        self.doubted = False
        self._opener = opener
        self._on_failure, self._on_open = on_failure, on_open
        self._database: Database | None = None

    async def read(self, ask: Callable[[Database], Awaitable[T]]) -> T | None:
        """Ask the open file; None when there is none, when it fails, and when it takes too long."""
        if self._database is None:
            return None
        try:
            async with asyncio.timeout(_READ_SECONDS):
                return await ask(self._database)
        except TimeoutError:
            self.failed("locked")
        except StoreError as error:
            self.failed(error.kind)
            self._doubt(error)
        return None

    async def ready(self) -> Database | None:
        """Return the open file, opened now if need be and possible."""
        if self._database is not None:
            if not self.doubted and await self._database.in_place():
                return self._database
            log.warning("database_reopened", extra={"reason": "failed" if self.doubted else "no longer at its path"})
            await self.close()
        if self.refused:
            return None
        self.doubted = False
        database = await self.attempt(self._opener())
        if database is None:
            return None
        self._database = database
        known = await self.attempt(database.known())
        if known is None:
            return None
        self._note(database)
        self._on_open(known)
        return database

    def _note(self, database: Database) -> None:
        if database.damaged or database.empty:
            what = "was damaged and is kept under another name" if database.damaged else "was an empty file"
            self.notice = f"the session database {what}: sessions begin anew"
            self.failed("damaged")

    async def attempt(self, work: Awaitable[T]) -> T | None:
        """Return what `work` returns, or None after noting its failure."""
        try:
            return await work
        except StoreError as error:
            self.down(error)
            return None

    def down(self, error: StoreError) -> None:
        """Note that the file cannot be written."""
        self.failed(error.kind)
        self._doubt(error)
        # Looking at a file that is not ours each few seconds would touch what we are not to touch.
        self.refused = self.refused or error.kind == "refused"
        if self.degraded != error.reason:
            log.error("store_degraded", extra={"kind": error.kind, "reason": error.reason})
            self.degraded = error.reason

    def recovered(self) -> None:
        """Note that all that waited is written."""
        if self.degraded is not None:
            log.info("store_recovered")
            self.degraded = None

    def failed(self, kind: Kind) -> None:
        """Count a failure."""
        self.failures += 1
        self._on_failure(kind)

    def _doubt(self, error: StoreError) -> None:
        self.doubted = self.doubted or error.kind in ("damaged", "unusable")

    async def close(self) -> None:
        """Close the file; `ready` opens it again."""
        if self._database is not None:
            database, self._database = self._database, None
            await database.close()
