"""Memory that outlives a restart: sessions in one SQLite file.

`sessions` is what the rest of the proxy sees: it never raises because of the file and never makes a request wait for a
write.  Below it `pending` is the bounded queue, `db` the connections and SQL, `files` the file itself, `migrations` the
schema, `faults` the one place where errors are mapped, `rows` the values, `keeper` what opens the file again.
"""

from proxy.store.faults import Kind
from proxy.store.rows import SessionInfo, SessionKey, SessionRow, remaining_seconds
from proxy.store.sessions import MEMORY, SessionStore, open_store

__all__ = [
    "MEMORY",
    "Kind",
    "SessionInfo",
    "SessionKey",
    "SessionRow",
    "SessionStore",
    "open_store",
    "remaining_seconds",
]
