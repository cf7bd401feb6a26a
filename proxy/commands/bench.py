"""`prefix-proxy bench`: what Open WebUI does, told to vLLM straight and through the proxy, side by side."""

import argparse
import asyncio
import getpass
import json
import os
import sys
import uuid
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.bench import report
from proxy.bench.client import Model, Unusable, Way, find_model, open_session
from proxy.bench.play import Part, Played, Player
from proxy.bench.scenarios import KNOWLEDGE_BASE, SCENARIOS, SIZES, requests_of
from proxy.config import SettingError
from proxy.config.setting import ENV_PREFIX
from proxy.demo.screen import Screen

MEASURED, NOT_ALL_MEASURED, CANNOT_BEGIN = 0, 1, 2
_USUAL_USERS, _USUAL_OUTPUT = 4, 64
# A question to a knowledge base: many users, a short chat each, long answers.
_BASE_USERS, _BASE_TURNS, _BASE_OUTPUT = 50, 2, 512
_EPILOG = """\
scenarios:
  clock           the time of day, to the second, in the system prompt
  document        a file that stands before the newest question only, and moves on with every turn
  memory          a memory in the system prompt that changes with every turn
  tools           a long list of tools, and a call with a cited result in every turn
  tasks           title, tags and follow-ups after the answers
  long            a chat that is long already, with a clock
  knowledge-base  50 users with a question each, 1,200 tokens in and 512 out

examples:
  prefix-proxy bench --upstream http://127.0.0.1:8000 --proxy http://127.0.0.1:9000
  prefix-proxy bench --upstream http://127.0.0.1:8000 --proxy http://127.0.0.1:9000 \\
      --scenario clock,document --users 16 --json > bench.json

Both ways take turns and share nothing in vLLM's cache.  It is real load: not while people wait for their answers.
exit codes: 0 all measured, 1 requests failed or the time was up, 2 it could not begin.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two ways, what is played, and its bounds."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--upstream", required=True, metavar="URL", help="vLLM itself")
    parser.add_argument("--proxy", required=True, metavar="URL", help="the proxy in front of it")
    parser.add_argument("--key", metavar="KEY", help="a trusted key for the proxy; - reads it from terminal or stdin")
    parser.add_argument("--model", metavar="M", help="which model (default: vLLM's first)")
    parser.add_argument("--scenario", metavar="S,S", default=",".join(SCENARIOS), help="default: all of them")
    parser.add_argument(
        "--users",
        type=_whole,
        metavar="N",
        help=f"users at once (default: {_USUAL_USERS}, knowledge-base {_BASE_USERS})",
    )
    parser.add_argument("--turns", type=_whole, default=4, metavar="T", help="turns of a chat (default: 4)")
    parser.add_argument(
        "--output", type=_whole, metavar="O",
        help=f"most tokens of an answer (default: {_USUAL_OUTPUT}, knowledge-base {_BASE_OUTPUT})",
    )  # fmt: skip
    parser.add_argument(
        "--size", choices=tuple(SIZES), default="normal", help="how long the texts are (default: normal)"
    )
    parser.add_argument(
        "--max-requests", type=_whole, default=2000, metavar="N", help="refuse to send more (default: 2000)"
    )
    parser.add_argument("--max-seconds", type=_whole, default=1800, metavar="S", help="stop after that (default: 1800)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Play and print; return 0, 1 if something could not be measured, 2 if it could not begin."""
    names = [name.strip() for name in args.scenario.split(",") if name.strip()]
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown or not names:
        raise SettingError(f"--scenario must name some of {', '.join(SCENARIOS)}.")
    planned = 2 * sum(_users(args, name) * requests_of(name, _turns(args, name)) for name in dict.fromkeys(names))
    if planned > args.max_requests:
        raise SettingError(
            f"That would be {planned} requests: take fewer --users, --turns or scenarios, or raise --max-requests."
        )
    ways = _ways(args)
    screen = Screen(Console(stderr=True))
    try:
        played, model, in_time = asyncio.run(_play(args, tuple(dict.fromkeys(names)), ways, screen))
    except Unusable as error:
        print(f"prefix-proxy: {error}", file=sys.stderr)
        return CANNOT_BEGIN
    finally:
        screen.close()
    return _tell(args, played, model, in_time=in_time)


def _ways(args: argparse.Namespace) -> tuple[Way, Way]:
    upstream, proxy = (_base(url) for url in (args.upstream, args.proxy))
    if upstream == proxy:
        raise SettingError("--upstream and --proxy are the same address: name vLLM itself, and the proxy.")
    key = _read_key() if args.key == "-" else args.key
    # The proxy puts salts of its own in place of a client's: this one keeps what is told straight apart from them.
    salt = {"cache_salt": f"bench-{uuid.uuid4().hex}"}
    straight = Way(report.WAYS[0], upstream, os.environ.get(f"{ENV_PREFIX}UPSTREAM_API_KEY") or None, salt)
    return straight, Way(report.WAYS[1], proxy, key, {})


def _read_key() -> str:
    return (getpass.getpass("Key: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()


def _base(url: str) -> str:
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise SettingError("--upstream and --proxy must be URLs like http://127.0.0.1:8000.")
    return base


async def _play(
    args: argparse.Namespace, names: Sequence[str], ways: tuple[Way, Way], screen: Screen
) -> tuple[Played, Model, bool]:
    """Play all parts; return what was measured, the model, and whether the time sufficed."""
    async with open_session() as session:
        model = await find_model(session, ways[0], args.model)
        await find_model(session, ways[1], model.name)
        player = Player(session, ways, model.name, uuid.uuid4().hex[:8])
        try:
            async with asyncio.timeout(args.max_seconds):
                await player.warm_up()
                for name in names:
                    part = _part(args, name, model)
                    with screen.waiting(f"{name}: {part.users} users, {part.turns} turns, two ways") as waiting:
                        await player.play(part, heard=waiting)
        except TimeoutError:
            return player.played, model, False
        return player.played, model, True


def _part(args: argparse.Namespace, name: str, model: Model) -> Part:
    turns = _turns(args, name)
    output = args.output or (_BASE_OUTPUT if name == KNOWLEDGE_BASE else _USUAL_OUTPUT)
    if model.context_tokens is not None:
        output = min(output, max(1, model.context_tokens // 4))
    told = 1 if name == KNOWLEDGE_BASE else turns
    sizes = SIZES[args.size].within(model.context_tokens, output_tokens=output, turns=told)
    return Part(name, _users(args, name), turns, output, sizes)


def _users(args: argparse.Namespace, name: str) -> int:
    return int(args.users or (_BASE_USERS if name == KNOWLEDGE_BASE else _USUAL_USERS))


def _turns(args: argparse.Namespace, name: str) -> int:
    return min(args.turns, _BASE_TURNS) if name == KNOWLEDGE_BASE else int(args.turns)


def _tell(args: argparse.Namespace, played: Played, model: Model, *, in_time: bool) -> int:
    found = report.summed(played)
    problems = report.failures(played)
    if not in_time:
        problems.append(
            f"The time was up after {args.max_seconds} seconds (--max-seconds): what is missing is not shown."
        )
    told = [figures for ways in found.values() for figures in ways.values() if figures.requests > figures.failed]
    if told and all(figures.cached_tokens is None for figures in told):
        problems.append("vLLM does not tell what was cached: start it with --enable-prompt-tokens-details.")
    if args.json:
        print(json.dumps({"model": model.name, "scenarios": report.as_json(found), "problems": problems}, indent=2))
    else:
        _print_table(report.rows(found), model.name)
    for problem in problems:
        print(f"prefix-proxy: {problem}", file=sys.stderr)
    return NOT_ALL_MEASURED if problems else MEASURED


def _print_table(rows: Sequence[Sequence[str]], model: str) -> None:
    name = "".join(sign if sign.isprintable() else "?" for sign in model)[:80]
    if not sys.stdout.isatty():
        print("\t".join(report.COLUMNS), *("\t".join(row) for row in rows), sep="\n")
        return
    table = Table(title=f"What Open WebUI does, with {name}", box=box.SIMPLE)
    for column in report.COLUMNS:
        table.add_column(column, justify="left" if column in report.COLUMNS[:2] else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row), end_section=row[1] == "ratio")
    Console().print(table)


def _whole(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number
