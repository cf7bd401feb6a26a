"""`prefix-proxy keys NAME`: make a client key; the key is shown once, the settings hold its hash."""

import argparse
import getpass
import sys

from proxy.config import SettingError
from proxy.config.checks import key_name
from proxy.downstream.auth import hash_token, new_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the key's name and marks."""
    parser.add_argument("name", metavar="NAME", help="shows in logs; the tenant of callers whose user is not known")
    parser.add_argument("--trusted", action="store_true", help="may name users and chats in headers (Open WebUI's key)")
    parser.add_argument("--admin", action="store_true", help="may call /v1/internal/*")
    parser.add_argument("--read", action="store_true", help="read an existing key (asked for, or a line of stdin)")


def run(args: argparse.Namespace) -> int:
    """Print the table on stdout and a new key on stderr, so that `>> FILE` appends the table alone."""
    try:
        name = key_name(args.name)
    except ValueError as error:
        raise SettingError(f"NAME = {args.name!r} cannot be used: {error}.") from None
    token = _read() if args.read else new_token()
    print(stanza(name, hash_token(token), trusted=args.trusted, admin=args.admin), end="")
    if not args.read:
        sys.stdout.flush()
        print(f"# The key, shown only now: {token}", file=sys.stderr)
    return 0


def stanza(name: str, stored: str, *, trusted: bool = False, admin: bool = False) -> str:
    """Return the TOML table of a key."""
    marks = "".join(f"{mark} = true\n" for mark, on in (("trusted", trusted), ("admin", admin)) if on)
    return f'[[keys]]\nname = "{name}"\nhash = "{stored}"\n{marks}'


def _read() -> str:
    token = getpass.getpass("Key: ") if sys.stdin.isatty() else sys.stdin.readline()
    if len(token := token.strip()) < 16:
        raise SettingError("The key that was read cannot be used: it has fewer than 16 characters.")
    return token
