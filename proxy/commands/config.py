"""`prefix-proxy config`: the settings in force, each with its value and where it comes from."""

import argparse
import json

from proxy.config.flags import add_setting_flags, setting_flags
from proxy.config.load import load_settings
from proxy.config.show import Row, markdown, rows, text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags: those of the settings, and the form of the output."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON object: path to value and origin")
    form.add_argument("--markdown", action="store_true", help="print the reference of all settings (deploy/CONFIG.md)")
    add_setting_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the settings; raises SettingError as `serve` would, so that it also serves as a check."""
    if args.markdown:
        print(markdown(), end="")
        return 0
    found = list(rows(load_settings(setting_flags(args))))
    if args.json:
        print(json.dumps({row.path: {"value": row.value, "origin": row.origin} for row in found}, indent=2))
    else:
        print(_table(found))
    return 0


def _table(found: list[Row]) -> str:
    width = max(len(row.path) for row in found)
    value_width = max(len(text(row.value)) for row in found)
    return "\n".join(f"{row.path:<{width}}  {text(row.value):<{value_width}}  {row.origin}" for row in found)
