"""The proxy's own secret: salts and delimiters are made from it."""

import os
import secrets
from pathlib import Path

from proxy.config import Config

SECRET_BYTES = 32


def load_secret(config: Config) -> bytes:
    """Return the secret of the settings, else the one kept beside the database, made at the first start (mode 0600).

    With `:memory:`, or where the file can be neither read nor written, it lasts as long as the process: a restart then
    begins with cold prefixes, which is safe.
    """
    if config.salt.secret is not None:
        return config.salt.secret.encode()
    if config.database == ":memory:":
        return secrets.token_bytes(SECRET_BYTES)
    path = Path(f"{config.database}.secret")
    try:
        return _read(path) or _make(path)
    except OSError:
        return secrets.token_bytes(SECRET_BYTES)


def _read(path: Path) -> bytes | None:
    try:
        held = path.read_bytes()
    except FileNotFoundError:
        return None
    return held if len(held) == SECRET_BYTES else None


def _make(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = secrets.token_bytes(SECRET_BYTES)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.touch(mode=0o600)
    new.write_bytes(made)
    os.replace(new, path)  # two that start at once: one secret wins, whole
    return _read(path) or made
