"""The settings as command-line flags, for every command that reads them."""

import argparse

from proxy.config.load import CONFIG_VARIABLE
from proxy.config.root import Config
from proxy.config.setting import declared
from proxy.config.values import allowed

_DEST = "setting:"


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Declare `--config` and a flag for each setting that has one; values are checked with all others, not here."""
    group = parser.add_argument_group(
        "settings", f"A flag beats an environment variable, that beats the file of --config or {CONFIG_VARIABLE}."
    )
    group.add_argument("--config", dest=_DEST + "config", metavar="FILE", help="TOML file with settings")
    for spec in declared(Config):
        flag, note = spec.setting.flag, spec.setting.help.replace("%", "%%")
        if flag is None:
            continue
        if spec.kind is bool:
            group.add_argument(flag, dest=_DEST + spec.path, action=argparse.BooleanOptionalAction, help=note)
        else:
            metavar = flag.rpartition("-")[2].upper()
            note = f"{note} [{allowed(spec)}]".replace("%", "%%")
            group.add_argument(flag, dest=_DEST + spec.path, metavar=metavar, help=note)


def setting_flags(args: argparse.Namespace) -> dict[str, object]:
    """Return the flags that were given, by the setting's path, as `load_settings` takes them."""
    return {
        name.removeprefix(_DEST): value
        for name, value in vars(args).items()
        if name.startswith(_DEST) and value is not None
    }
