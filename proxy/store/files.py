"""The database as a file: made with mode 0600, looked at before SQLite opens it, moved aside when it is damaged.

All functions here block; the store calls them in a thread.
"""

import errno
import fcntl
import os
import secrets
import sqlite3
import stat
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from proxy.store.faults import StoreError, mapped

APPLICATION_ID = 0x50505258  # "PPRX"; the first migration sets it too
_MAGIC = b"SQLite format 3\0"  # https://www.sqlite.org/fileformat.html, 1.3.1
_ANY_WRITE_BIT = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
# SQLite keeps these beside the database; without its log a database may be an older one, so they stay together.
_COMPANIONS = ("-wal", "-shm", "-journal")


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands at the path: `identity` is device and inode, `empty` a file of 0 bytes that was there before us,
    `garbled` one that does not begin as a database."""

    identity: tuple[int, int]
    empty: bool
    garbled: bool


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return device and inode of what stands at `path`, or None."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def prepare(path: Path) -> Standing:
    """Make the file, and its folder, if there is none, and check that it can be written.

    A file or folder without any write bit is taken as read-only even where root could write it: somebody meant it so.
    Raises `StoreError` "unusable" with the reason.
    """
    with mapped():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_dir():
            raise StoreError("unusable", "the path of the session database is a folder")
        _check_folder(path.parent)
        made = not os.path.lexists(path) and _make(path)
        if not made:
            _check_file(path)
        found = path.stat()
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
        # SQLite would find out by itself, but it takes the log of such a file for a stale one and deletes it.
        return Standing((found.st_dev, found.st_ino), not made and not start, start not in (b"", _MAGIC))


def _make(path: Path) -> bool:
    """Make an empty database; return False if another process was quicker.

    It comes to its path whole, by a hard link: a file of 0 bytes there is then never one that another process of ours
    is just making, and its mode is ours, not the one that SQLite would choose.  (-wal and -shm take over the mode.)
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # A file system without hard links.
        return _make_in_place(path)
    finally:
        draft.unlink()
    return True


def _make_in_place(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True


def _check_folder(folder: Path) -> None:
    # SQLite makes its log beside the file, so a folder that cannot be written is as bad as such a file.
    if not folder.stat().st_mode & _ANY_WRITE_BIT or not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError("unusable", "the folder of the session database cannot be written")


def _check_file(path: Path) -> None:
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise StoreError("unusable", "the path of the session database is not a regular file")
    if not mode & _ANY_WRITE_BIT or not os.access(path, os.R_OK | os.W_OK):
        raise StoreError("unusable", "the session database is read-only")
    if mode & 0o077:
        try:
            path.chmod(0o600)
        except PermissionError:
            return  # Another user's file that we may write: its mode is that user's business.


def move_aside(path: Path, identity: tuple[int, int], *, now: float) -> Path | None:
    """Rename a damaged database, with its companions, to `name.corrupt-TIME`; return the new path.

    None when another process was quicker: what stands at the path now is no longer the file of `identity`.  Call it
    only after our own connections to the file are closed.  Raises `StoreError` when it cannot be renamed.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    with mapped():
        try:
            held = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            # Two processes may find the damage at once; the second must not move away the first one's fresh file.
            fcntl.flock(held, fcntl.LOCK_EX)
            if identity_of(path) != identity:
                return None
            aside = _free_name(path, stamp)
            for suffix in _COMPANIONS:
                if (companion := path.with_name(path.name + suffix)).exists():
                    companion.rename(aside.with_name(aside.name + suffix))
            path.rename(aside)
            return aside
        finally:
            os.close(held)


def _free_name(path: Path, stamp: str) -> Path:
    aside = path.with_name(f"{path.name}.corrupt-{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.corrupt-{stamp}-{number}")
    return aside
