"""`prefix-proxy template check`: does a chat template keep the prefix of a conversation that grows?"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.chat_template import TemplateFailed, bundled, read_special_tokens, read_template, tokenizer
from proxy.config import SettingError
from proxy.config.groups import Upstream as Settings
from proxy.config.setting import ENV_PREFIX
from proxy.core.template_check import Verdict, checked, stable
from proxy.template_verdicts import check_file, check_upstream
from proxy.upstream.client import Upstream
from proxy.upstream.rendering import NoAnswer, UpstreamRenderer

STABLE, UNSTABLE, NOT_CHECKED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to check and how to print it."""
    parser.add_argument("action", choices=("check",), help="render growing conversations and compare")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--upstream", metavar="URL", help="a running vLLM, asked through /tokenize")
    where.add_argument(
        "--file",
        metavar="TEMPLATE",
        help=f"a template, a tokenizer_config.json that holds one, or {', '.join(bundled())}",
    )
    parser.add_argument("--model", metavar="M", help="with --upstream: which model (default: the first)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="with --file: a tokenizer.json, to count in tokens"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Check and print; return 0 if every prefix is kept, 1 if not, 2 if that could not be found out."""
    if (args.tokenizer and args.upstream) or (args.model and args.file):
        raise SettingError("--tokenizer goes with --file, --model with --upstream.")
    try:
        verdicts = asyncio.run(_check_upstream(args)) if args.upstream else _check_file(args)
    except (TemplateFailed, NoAnswer) as error:
        print(f"prefix-proxy: {error}", file=sys.stderr)
        return NOT_CHECKED
    code = NOT_CHECKED if not checked(verdicts) else STABLE if stable(verdicts) else UNSTABLE
    unit = "token" if args.upstream or args.tokenizer else "character"
    if args.json:
        print(json.dumps(_as_json(verdicts, code, unit), indent=2, ensure_ascii=False))
    else:
        _print(verdicts, code, unit)
    return code


async def _check_upstream(args: argparse.Namespace) -> Sequence[Verdict]:
    key = os.environ.get(f"{ENV_PREFIX}UPSTREAM_API_KEY")
    upstream = Upstream(Settings(url=_base(args.upstream), api_key=key or None))
    try:
        return (await check_upstream(UpstreamRenderer(upstream.fetch, args.model).render)).verdicts
    finally:
        await upstream.close()


def _check_file(args: argparse.Namespace) -> Sequence[Verdict]:
    path = Path(args.file) if Path(args.file).exists() else bundled().get(args.file, Path(args.file))
    text, tokens = read_template(path)
    encode = tokenizer(args.tokenizer) if args.tokenizer else None
    if not tokens and args.tokenizer and (beside := args.tokenizer.with_name("tokenizer_config.json")).is_file():
        tokens = read_special_tokens(beside)
    return check_file(text, tokens, encode).verdicts


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _as_json(verdicts: Sequence[Verdict], code: int, unit: str) -> Mapping[str, object]:
    cases = [
        {name: getattr(each, name) for name in Verdict.__slots__ if getattr(each, name) not in (None, "")}
        for each in verdicts
    ]
    return {"result": ("stable", "unstable", "not checked")[code], "unit": unit, "cases": cases}


def _print(verdicts: Sequence[Verdict], code: int, unit: str) -> None:
    rows = [(each.case, _outcome(each), _where(each, unit), _why(each)) for each in verdicts]
    if sys.stdout.isatty():
        table = Table()
        for name in ("case", "prefix", "breaks", "why"):
            table.add_column(name)
        for row in rows:
            # As Text: what a template renders is no markup of ours.
            table.add_row(*(Text(cell) for cell in row), style={"unstable": "red", "stable": ""}.get(row[1], "dim"))
        Console().print(table)
    else:
        for row in rows:
            print("\t".join(row))
    broken = sum(each.outcome == "unstable" and each.counted for each in verdicts)
    seen = sum(each.outcome in ("stable", "unstable") and each.counted for each in verdicts)
    print(
        {
            STABLE: f"Stable: the prefix is kept in all {seen} cases.",
            UNSTABLE: f"Unstable: {broken} of {seen} cases lose their prefix.",
            NOT_CHECKED: "The template could not be checked.",
        }[code]
    )


def _outcome(verdict: Verdict) -> str:
    return verdict.outcome if verdict.counted else f"({verdict.outcome})"


def _where(verdict: Verdict, unit: str) -> str:
    return f"turn {verdict.turn}, {unit} {verdict.position}" if verdict.position is not None else ""


def _why(verdict: Verdict) -> str:
    if verdict.cause is None:
        return _printable(verdict.why)
    shown = f": {_shown(verdict.expected)} became {_shown(verdict.found)}" if verdict.expected else ""
    return f"{verdict.cause}{shown}"


def _shown(text: str) -> str:
    return json.dumps(_printable(text[:24].replace("\n", "⏎")), ensure_ascii=False)


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text)[:160]
