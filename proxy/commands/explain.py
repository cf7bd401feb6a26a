"""`prefix-proxy explain`: where recorded requests leave the prompt before them, and what the rewriting mends."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.config import SettingError
from proxy.config.load import load_settings
from proxy.core.prefix import ASSUMED_BLOCK_TOKENS
from proxy.offline import Explained, Offline, Shared, lines_of

_COLUMNS = ("n", "chat", "turn", "prompt", "shared", "break", "cause", "rewritten", "break", "cause", "trail")
_ESTIMATE = "tokens are estimates: characters / 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the recording and what it is played through."""
    parser.add_argument("file", nargs="+", metavar="FILE", help="JSON lines as `serve --record` writes them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--block", type=int, default=ASSUMED_BLOCK_TOKENS, metavar="TOKENS", help="vLLM's block size (default: 16)"
    )
    parser.add_argument("--profile", choices=("off", "safe", "balanced", "max"), help="default: that of the settings")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")


def run(args: argparse.Namespace) -> int:
    """Explain every chat request; return 0, or 1 where there is none.  Raises SettingError for what cannot be read."""
    if not 1 <= args.block <= 65536:
        raise SettingError("--block must be a whole number of tokens from 1 to 65536.")
    flags = {"config": args.config, "profile": args.profile}
    config = load_settings({name: value for name, value in flags.items() if value is not None}).config
    offline = Offline(config, args.block)
    unread, rows = 0, []
    for path in args.file:
        for line in lines_of(_read(Path(path))):
            unread += line is None
            rows += [] if line is None else [offline.explain(line)]
    if args.json:
        print(json.dumps(_report(rows, config.profile, args.block, unread), indent=2))
    else:
        _print(rows, config.profile, args.block, unread)
    return 0 if rows else 1


def _read(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {(error.strerror or 'it is no file').lower()}.") from None


def _report(rows: Sequence[Explained], profile: str, block: int, unread: int) -> dict[str, object]:
    return {
        "estimate": _ESTIMATE,
        "profile": profile,
        "block_tokens": block,
        "unread_lines": unread,
        "requests": [_as_json(row) for row in rows],
        "totals": _totals(rows),
    }


def _as_json(row: Explained) -> dict[str, object]:
    real = row.line.real
    return {
        "n": row.line.number,
        "chat": row.chat or None,
        "task": row.task,
        "turn": row.turn,
        "messages": len(row.line.request.messages),
        "received": _side(row.received),
        "rewritten": _side(row.rewritten) if row.rewritten is not None else None,
        "trail": list(row.trail),
        "real": None if real is None else {name: real.get(name) for name in ("prompt_tokens", "cached_tokens")},
    }


def _side(shared: Shared) -> dict[str, object]:
    found = shared.found
    return {
        "prompt_tokens": shared.prompt_tokens,
        "compared": shared.compared,
        "shared_messages": found.messages if found is not None else None,
        "shared_tokens": found.tokens if found is not None else None,
        "break_at_message": found.message if found is not None else None,
        "char_offset": found.character if found is not None else None,
        "cause": (found.cause or None) if found is not None else None,
    }


def _totals(rows: Sequence[Explained]) -> dict[str, int]:
    """Count the chats; tasks have prompts of their own."""
    chats = [row for row in rows if row.task is None]
    sides: Mapping[str, list[Shared]] = {
        "received": [row.received for row in chats],
        "rewritten": [row.rewritten for row in chats if row.rewritten is not None],
    }
    out = {"chat_requests": len(chats), "tasks": len(rows) - len(chats)}
    for name, side in sides.items():
        out[f"{name}_prompt_tokens"] = sum(each.prompt_tokens for each in side)
        out[f"{name}_shared_tokens"] = sum(each.found.tokens for each in side if each.found is not None)
        out[f"{name}_breaks"] = sum(bool(each.found.cause) for each in side if each.found is not None)
    return out


def _print(rows: Sequence[Explained], profile: str, block: int, unread: int) -> None:
    totals = _totals(rows)
    notes = [f"profile {profile}, blocks of {block} tokens, {_ESTIMATE}"]
    for side in ("received", "rewritten"):
        prompt, shared = totals[f"{side}_prompt_tokens"], totals[f"{side}_shared_tokens"]
        if prompt:
            notes.append(f"{side}: {shared} of {prompt} tokens shared, {totals[f'{side}_breaks']} breaks")
    notes += [f"{unread} lines could not be read"] if unread else []
    if sys.stdout.isatty():
        table = Table(title="What each prompt shares with the last one of its chat")
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("cause", "trail") else "right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in _cells(row)))
        Console().print(table)
    else:
        print("\t".join(_COLUMNS))
        for row in rows:
            print("\t".join(_cells(row)))
    print("\n".join(notes))


def _cells(row: Explained) -> list[str]:
    chat = row.task or f"{row.chat}"
    after = _where(row.rewritten) if row.rewritten is not None else ["", "", ""]
    return [
        f"{row.line.number}",
        chat,
        f"{row.turn}",
        f"{row.received.prompt_tokens}",
        *_where(row.received),
        *after,
        ",".join(row.trail),
    ]


def _where(shared: Shared) -> list[str]:
    found = shared.found
    if found is None:
        return ["", "", ""]
    place = "" if found.message is None else f"{found.message}" + (f":{found.character}" if found.located else "")
    return [f"{found.tokens}" if shared.compared else "", place, found.cause]
