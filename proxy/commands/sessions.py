"""`prefix-proxy sessions list|clear`: what is remembered, in the database or in a running proxy, and forgetting it."""

import argparse
import asyncio
import getpass
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.config import SettingError, load_config
from proxy.downstream.admin import CLEAR_PATH, LIST_PATH, MOST_LISTED, as_json
from proxy.store import MEMORY
from proxy.store.faults import StoreError
from proxy.store.offline import clear_sessions, list_sessions

_TIMEOUT_SECONDS = 30.0
_COLUMNS = ("id", "model", "turns", "last_seen", "expires_seconds", "bytes")

Session = Mapping[str, object]


class _Failed(Exception):
    """What the user is told in one sentence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to do, and where."""
    parser.add_argument("action", choices=("list", "clear"), help="clear takes expired sessions unless told otherwise")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--database", metavar="PATH", help="the file (default: that of the settings)")
    where.add_argument("--url", metavar="URL", help="a running proxy, such as http://127.0.0.1:9000")
    parser.add_argument("--key", metavar="KEY", help="an admin key for --url; - reads it from the terminal or stdin")
    parser.add_argument("--session", metavar="ID", help="only this session")
    parser.add_argument("--all", action="store_true", help="clear: all sessions, not only expired ones")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List or clear; return 0, or 1 with one sentence on stderr when that cannot be done."""
    if args.all and (args.session or args.action == "list"):
        raise SettingError("--all goes with clear, and not with --session.")
    if args.key and not args.url:
        raise SettingError("--key goes with --url.")
    try:
        if args.action == "list":
            found = _remote_list(args) if args.url else _local_list(args)
            _print_list([each for each in found if args.session in (None, each["id"])], as_json=args.json)
        else:
            cleared = _remote_clear(args) if args.url else _local_clear(args)
            print(json.dumps({"cleared": cleared}) if args.json else f"cleared {cleared}")
    except (StoreError, _Failed) as error:
        print(f"prefix-proxy: {error}", file=sys.stderr)
        return 1
    return 0


def _path(args: argparse.Namespace) -> Path:
    path = args.database or load_config().database
    if path == MEMORY:
        raise SettingError("The database is :memory:, so only the running proxy knows its sessions: give its --url.")
    return Path(path)


def _local_list(args: argparse.Namespace) -> list[Session]:
    return [as_json(info) for info in list_sessions(_path(args), now=time.time())]


def _local_clear(args: argparse.Namespace) -> int:
    return clear_sessions(_path(args), now=time.time(), id=args.session, everything=args.all)


def _remote_list(args: argparse.Namespace) -> list[Session]:
    answer = asyncio.run(_ask(args, "GET", f"{LIST_PATH}?limit={MOST_LISTED}", None))
    found = answer.get("sessions")
    if not isinstance(found, list):
        raise _Failed("what answers at this URL is not a prefix-proxy")
    return [each for each in found if isinstance(each, dict)]


def _remote_clear(args: argparse.Namespace) -> int:
    wish: dict[str, object] = {"all": True} if args.all else {"session": args.session} if args.session else {}
    cleared = asyncio.run(_ask(args, "POST", CLEAR_PATH, orjson.dumps(wish))).get("cleared")
    if not isinstance(cleared, int):
        raise _Failed("what answers at this URL is not a prefix-proxy")
    return cleared


async def _ask(args: argparse.Namespace, method: str, path: str, body: bytes | None) -> Mapping[str, object]:
    base = str(args.url).rstrip("/").removesuffix("/v1")
    key = _read_key() if args.key == "-" else args.key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, base + path, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            return _understood(answer.status, await answer.read())
    except (aiohttp.ClientError, TimeoutError, ValueError):
        raise _Failed("the proxy cannot be reached at this URL") from None


def _understood(status: int, raw: bytes) -> Mapping[str, object]:
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise _Failed(f"what answers at this URL is not a prefix-proxy (status {status})")
    if status != 200:
        error = answer.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        raise _Failed(f"refused with status {status}: {_printable(message or 'no reason given')}")
    return answer


def _read_key() -> str:
    return (getpass.getpass("Key: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()


def _print_list(found: Sequence[Session], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"sessions": list(found), "total": len(found)}, indent=2))
    elif sys.stdout.isatty():
        Console().print(_table(found))
    else:
        for each in found:
            print("\t".join(_cells(each)))


def _table(found: Sequence[Session]) -> Table:
    table = Table(title=f"{len(found)} sessions")
    for name in _COLUMNS:
        table.add_column(name.replace("_", " "), justify="left" if name in ("id", "model") else "right")
    for each in found:
        # As Text: a model's name is the client's choice, and is no markup of ours.
        table.add_row(*(Text(cell) for cell in _cells(each)))
    return table


def _cells(session: Session) -> list[str]:
    return [_cell(name, session.get(name)) for name in _COLUMNS]


def _cell(name: str, value: object) -> str:
    if name == "last_seen" and isinstance(value, int | float):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return f"{value:.0f}" if isinstance(value, float) else _printable(value)


def _printable(value: object) -> str:
    """Return text without control characters: a model's name, chosen by a client, must not steer the terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in str(value))[:200]
