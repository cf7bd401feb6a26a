-- The first schema.  Times are wall seconds since 1970 and serve a restart only: while the proxy runs, sessions expire by
-- its monotonic clock.  Tenants and chats are digests; `skeleton` and `state` are opaque to SQL.
-- 0x50505258 is "PPRX": a file with tables of its own and without this mark belongs to another program and is left alone.
PRAGMA application_id = 1347441240;

CREATE TABLE sessions (
    tenant    BLOB    NOT NULL CHECK (length(tenant) = 16),
    chat      BLOB    NOT NULL CHECK (length(chat) = 16),
    model     TEXT    NOT NULL,
    created   REAL    NOT NULL,
    last_seen REAL    NOT NULL,
    expires   REAL    NOT NULL,
    turns     INTEGER NOT NULL CHECK (turns >= 0),
    cut       INTEGER NOT NULL CHECK (cut >= 0),
    skeleton  BLOB    NOT NULL,
    state     BLOB    NOT NULL,
    PRIMARY KEY (tenant, chat, model)
);

-- The sweep asks for what has expired.
CREATE INDEX sessions_expires ON sessions (expires);

CREATE TABLE meta (
    key   TEXT NOT NULL PRIMARY KEY,
    value BLOB NOT NULL
);
