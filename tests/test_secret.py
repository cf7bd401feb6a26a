"""The proxy's own secret: kept beside the database, readable by nobody else, whole or not at all."""

import os
from pathlib import Path

from proxy.config import Config
from proxy.secret import SECRET_BYTES, load_secret


def at(path: Path | str, **values: object) -> Config:
    """Return settings with this database."""
    return Config().with_values({"database": str(path), **values})


def test_it_is_made_once_and_kept(tmp_path: Path) -> None:
    """A restart makes the same salts; mode 0600, in a folder that may be new."""
    path = tmp_path / "new" / "sessions.db"
    first = load_secret(at(path))
    assert len(first) == SECRET_BYTES and load_secret(at(path)) == first
    kept = tmp_path / "new" / "sessions.db.secret"
    assert kept.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path / "new") == [kept.name]


def test_two_databases_have_two_secrets(tmp_path: Path) -> None:
    """And one in memory has one for the length of the process."""
    made = {load_secret(at(tmp_path / "a")), load_secret(at(tmp_path / "b")), load_secret(at(":memory:"))}
    made.add(load_secret(at(":memory:")))
    assert len(made) == 4


def test_the_settings_have_precedence(tmp_path: Path) -> None:
    """Several proxies in front of one vLLM; nothing is written then."""
    assert load_secret(at(tmp_path / "a", **{"salt.secret": "of the settings!"})) == b"of the settings!"
    assert os.listdir(tmp_path) == []


def test_a_torn_file_is_replaced(tmp_path: Path) -> None:
    """A crash in the middle of a copy: half a secret is none."""
    (tmp_path / "a.secret").write_bytes(b"half")
    made = load_secret(at(tmp_path / "a"))
    assert len(made) == SECRET_BYTES and load_secret(at(tmp_path / "a")) == made


def test_where_nothing_can_be_written_it_lasts_as_long_as_the_process(tmp_path: Path) -> None:
    """Cold prefixes after a restart are safe; not to start is not."""
    (tmp_path / "file").write_bytes(b"")
    assert len(load_secret(at(tmp_path / "file" / "a"))) == SECRET_BYTES
    (tmp_path / "b.secret").mkdir()
    assert len(load_secret(at(tmp_path / "b"))) == SECRET_BYTES
