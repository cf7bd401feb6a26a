"""The command line: `prefix-proxy COMMAND`.  Each command is a module with `add_arguments(parser)` and `run(args)`.

One that declares `TAKES_REST` finds in `args.rest` what stands after `--`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, Protocol, cast

from proxy.config import SettingError

BAD_USE = 2  # as argparse and most shells have it


class Command(NamedTuple):
    """Where a command lives and what it does, in one line."""

    module: str
    help: str


COMMANDS = {
    "serve": Command("proxy.commands.serve", "run the proxy"),
    "config": Command("proxy.commands.config", "print the settings in force and where each comes from"),
    "keys": Command("proxy.commands.keys", "make a client key and print it with its [[keys]] table"),
    "sessions": Command("proxy.commands.sessions", "list or clear the remembered sessions"),
    "template": Command("proxy.commands.template", "check whether a chat template keeps the prefix of a growing chat"),
    "explain": Command("proxy.commands.explain", "say where the requests of a recording leave the prompt before them"),
    "doctor": Command("proxy.commands.doctor", "check a running vLLM and Open WebUI, and say what mends them"),
    "plan": Command("proxy.commands.plan", "say what of a model fits on a card, and with which flags of vLLM"),
    "bench": Command("proxy.commands.bench", "measure what Open WebUI does, straight at vLLM and through the proxy"),
    "up": Command("proxy.commands.up", "start vLLM and the proxy before it, and keep both running"),
    "demo": Command("proxy.commands.demo", "play a chat against a real vLLM, with and without the proxy"),
}


class CommandModule(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; return the exit code.  Raises SettingError for what the user can mend."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 2 for a setting or use that cannot be."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    # Only the module of the chosen command is imported: `keys` needs no aiohttp server, `serve` no demo.
    module = _load(COMMANDS[chosen].module) if chosen in COMMANDS else None
    words, rest = _split(words) if hasattr(module, "TAKES_REST") else (words, [])
    args = _parser(chosen, module).parse_args(words)
    args.rest = rest
    if module is None:
        return BAD_USE
    try:
        return module.run(args)
    except SettingError as error:
        print(f"prefix-proxy: {error}", file=sys.stderr)
        return BAD_USE
    except KeyboardInterrupt:
        return 130


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return what stands before and after the first `--`: another program's flags, which ours must not read."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _parser(chosen: str | None, module: CommandModule | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prefix-proxy",
        description="Makes every turn of a chat reuse the prefix cache of vLLM.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"prefix-proxy {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        summary = command.help.capitalize() + "."
        sub = commands.add_parser(name, help=command.help, description=summary, allow_abbrev=False)
        if name == chosen and module is not None:
            module.add_arguments(sub)
    return parser


def _load(name: str) -> CommandModule:
    return cast(CommandModule, importlib.import_module(name))


def _version() -> str:
    try:
        return version("prefix-proxy")
    except PackageNotFoundError:
        return "(not installed)"
