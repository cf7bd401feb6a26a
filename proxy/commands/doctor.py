"""`prefix-proxy doctor`: what is wrong with a running vLLM and Open WebUI, why it matters, and what mends it."""

import argparse
import asyncio
import difflib
import getpass
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from proxy.config import SettingError, checks
from proxy.config.groups import Upstream as Settings
from proxy.config.setting import ENV_PREFIX
from proxy.demo.screen import Screen
from proxy.doctor import looking, webui
from proxy.doctor.finding import NOT_CHECKED, TO_MEND, WELL, Finding, exit_code
from proxy.doctor.flags import judge_flags
from proxy.doctor.vllm_checks import judge_vllm
from proxy.doctor.webui_checks import judge_webui, wanted_headers

_USUAL_PROXY = "http://127.0.0.1:9000"
_MOST_FLAGS_BYTES = 100_000
_EPILOG = """\
examples:
  prefix-proxy doctor --upstream http://127.0.0.1:8000
  prefix-proxy doctor --upstream unix:/run/vllm.sock --json
  prefix-proxy doctor --flags "vllm serve Qwen/Qwen2.5-7B-Instruct --swap-space 4"
  prefix-proxy doctor --upstream http://127.0.0.1:8000 --openwebui http://127.0.0.1:8080 --openwebui-key - --fix

It asks vLLM for some single tokens and times a prompt of up to 6,000 tokens, twice.  vLLM's own key comes from
PREFIX_PROXY_UPSTREAM_API_KEY.  With --fix it offers to set the headers of Open WebUI's connections; nothing else.
exit codes: 0 well, 1 something to mend, 2 something could not be checked.
"""
_TOGETHER = (("fix", "openwebui_key"), ("openwebui_key", "openwebui"), ("yes", "fix"), ("model", "upstream"))
_STYLES = {"well": "green", "mend": "bold red", "note": "dim", "failed": "bold yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to look at, and what to do with it."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--upstream", metavar="URL", help="vLLM itself, not the proxy; also unix:PATH")
    parser.add_argument("--model", metavar="M", help="which model of vLLM (default: the first)")
    parser.add_argument("--flags", metavar="TEXT", help="a command line of vLLM, in quotes; - reads it from stdin")
    parser.add_argument("--openwebui", metavar="URL", help="Open WebUI")
    parser.add_argument("--openwebui-key", metavar="K", help="an admin's API key or token; - asks for it")
    note = f"where Open WebUI finds the proxy (default: {_USUAL_PROXY})"
    parser.add_argument("--proxy", default=_USUAL_PROXY, metavar="URL", help=note)
    parser.add_argument("--fix", action="store_true", help="set what can be set in Open WebUI: shows a diff, asks")
    parser.add_argument("--yes", action="store_true", help="with --fix: do not ask")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Look and print; return 0 well, 1 something to mend, 2 something not checked.  Raises SettingError."""
    _check(args)
    screen = Screen(Console(stderr=True))
    try:
        findings = asyncio.run(_look(args, screen))
    finally:
        screen.close()
    code = exit_code(findings)
    if args.json:
        result = {WELL: "well", TO_MEND: "to mend", NOT_CHECKED: "not checked"}[code]
        print(json.dumps({"result": result, "findings": [asdict(each) for each in findings]}, indent=2))
    else:
        _print(findings, code)
    return code


def _check(args: argparse.Namespace) -> None:
    if not (args.upstream or args.flags or args.openwebui):
        raise SettingError("Name what to look at: --upstream URL, --flags TEXT or --openwebui URL.")
    for wanting, other in _TOGETHER:
        if getattr(args, wanting) and not getattr(args, other):
            raise SettingError(f"--{wanting.replace('_', '-')} goes with --{other.replace('_', '-')}.")
    if args.fix and not args.yes and not sys.stdin.isatty():
        raise SettingError("--fix asks before it changes anything, and there is no terminal: add --yes.")
    for name in ("openwebui", "proxy"):
        if (url := getattr(args, name)) and not url.startswith(("http://", "https://")):
            raise SettingError(f"--{name} must be a URL like http://127.0.0.1:8080.")
    if args.openwebui_key == "-":
        args.openwebui_key = getpass.getpass("Key: ") if sys.stdin.isatty() else sys.stdin.readline().strip()
    if args.flags == "-":
        args.flags = sys.stdin.read(_MOST_FLAGS_BYTES)


async def _look(args: argparse.Namespace, screen: Screen) -> Sequence[Finding]:
    findings: list[Finding] = []
    if args.flags:
        findings += judge_flags(args.flags)
    if args.upstream:
        findings += await _look_at_vllm(args, screen)
    if args.openwebui:
        findings += await _look_at_webui(args, screen)
    return findings


async def _look_at_vllm(args: argparse.Namespace, screen: Screen) -> Sequence[Finding]:
    try:
        url = str(checks.upstream_url(args.upstream))
    except ValueError as error:
        raise SettingError(f"--upstream cannot be used: {error}; allowed: http://HOST:PORT or unix:PATH.") from None
    settings = Settings(url=url, api_key=os.environ.get(f"{ENV_PREFIX}UPSTREAM_API_KEY") or None)
    begun: list[str] = []

    def report(doing: str) -> None:
        if begun:
            screen.close()
        begun.append(doing)
        if not args.json:
            screen.step(f"{doing[0].upper()}{doing[1:]}")

    try:
        return judge_vllm(await looking.look(settings, args.model, report=report))
    finally:
        screen.close()


async def _look_at_webui(args: argparse.Namespace, screen: Screen) -> Sequence[Finding]:
    async with webui.open_session() as session:
        api = webui.Api(session, args.openwebui, args.openwebui_key)
        seen = await _seen(args, api, screen)
        wanted = wanted_headers(seen) if args.fix else {}
        if wanted and _agreed(args, seen, wanted):
            if not await webui.set_headers(api, wanted):
                raise SettingError("Open WebUI did not take the headers: the key must be an admin's.")
            seen = await _seen(args, api, screen)
        return judge_webui(seen, proxy=args.proxy)


async def _seen(args: argparse.Namespace, api: webui.Api, screen: Screen) -> webui.WebUI:
    if not args.json:
        screen.step("Looking at Open WebUI")
    try:
        return await webui.look(api, proxy=args.proxy, upstream=args.upstream, has_key=bool(args.openwebui_key))
    finally:
        screen.close()


def _agreed(args: argparse.Namespace, seen: webui.WebUI, wanted: Mapping[int, Mapping[str, str]]) -> bool:
    """Show what would change, and ask; on stderr, so that stdout stays what a program reads."""
    for each in seen.connections or ():
        if each.place in wanted:
            name = f"connection {each.place}, headers"
            before, after = (_lines(headers) for headers in (each.headers, wanted[each.place]))
            print(*difflib.unified_diff(before, after, f"{name}, now", f"{name}, then", lineterm=""),
                  sep="\n", file=sys.stderr)  # fmt: skip
    if args.yes:
        return True
    with suppress(EOFError):
        print("Set these in Open WebUI? [y/N] ", end="", file=sys.stderr, flush=True)
        return input().strip().lower() in ("y", "yes")
    return False


def _lines(headers: Mapping[str, str]) -> list[str]:
    return json.dumps(headers, indent=2, ensure_ascii=True).splitlines()


def _print(findings: Sequence[Finding], code: int) -> None:
    console = Console(highlight=False, soft_wrap=True)
    part = ""
    for each in findings:
        if each.part != part:
            part = each.part
            console.print(Text(part, style="bold"))
        line = Text(f"  {each.state:<6} ", style=_STYLES[each.state])
        line.append(f"{each.check}: {each.says}", style="" if each.state != "note" else "dim")
        console.print(line)
        style = "dim" if each.state == "note" else ""
        for name, text in (("why", each.why), ("use" if each.state == "note" else "mend", each.mend)):
            if text and each.state != "well":
                console.print(Text(f"           {name}: {text}", style))
    count = sum(each.state == "mend" for each in findings)
    unseen = sum(each.state == "failed" for each in findings)
    print({
        WELL: "Well: nothing to mend.",
        TO_MEND: f"{count} thing{'s' if count != 1 else ''} to mend.",
        NOT_CHECKED: f"Nothing found to mend, but {unseen} could not be checked.",
    }[code])  # fmt: skip
