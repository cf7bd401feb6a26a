"""Settings for people: a table of what is in force, and the reference deploy/CONFIG.md."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from proxy.config.load import CONFIG_VARIABLE, Loaded
from proxy.config.root import Config, Key
from proxy.config.setting import Declared, declared
from proxy.config.values import allowed

MASK = "***"
KEY_LIMITS = ("max_output_tokens", "requests_per_minute", "tokens_per_minute", "concurrent")


@dataclass(frozen=True, slots=True)
class Row:
    """One setting in force: its path, its value (secrets masked) and where that comes from."""

    path: str
    value: object
    origin: str


def rows(loaded: Loaded) -> Iterator[Row]:
    """Yield the settings in force in their order, then the keys by name, without their hashes."""
    for spec in declared(Config):
        value = _get(loaded.config, spec.path)
        yield Row(spec.path, MASK if spec.setting.secret and value is not None else value, loaded.origins[spec.path])
    for key in loaded.config.keys:
        marks = [name for name in ("trusted", "admin") if getattr(key, name)]
        limits = [f"{name}={getattr(key, name)}" for name in KEY_LIMITS if getattr(key, name) is not None]
        yield Row(f"keys.{key.name}", " ".join([MASK, *marks, *limits]), "[[keys]]")


def text(value: object) -> str:
    """Write a value the way a flag or variable takes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value) or "(empty)"
    if isinstance(value, Mapping):
        return ",".join(f"{name}={number}" for name, number in value.items()) or "(empty)"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def markdown() -> str:
    """Return deploy/CONFIG.md, made from the declarations."""
    parts = [_HEAD]
    group = None
    for spec in declared(Config):
        name = spec.path.partition(".")[0] if "." in spec.path else ""
        if name != group:
            parts.append(_group_head(name))
            group = name
        parts.append(_section(spec))
    parts.append(_KEYS)
    return "\n".join(parts)


def _group_head(name: str) -> str:
    if not name:
        return "## At the top of the file\n"
    kind = next(field.default_factory for field in fields(Config) if field.name == name)
    return f"## [{name}]\n\n{inspect.getdoc(kind)}\n"


def _section(spec: Declared) -> str:
    setting = spec.setting
    ways = [f"`{setting.flag}`"] if setting.flag else []
    ways += [f"`{name}`" for name in spec.envs]
    unit = f" {setting.unit}" if setting.unit and isinstance(spec.default, int | float) else ""
    lines = [
        f"### `{spec.path}`\n",
        f"{setting.help}\n",
        f"- Default: `{text(spec.default)}`{unit}" + (" (secret: shown as `***`)" if setting.secret else ""),
        f"- Allowed: {allowed(spec)}",
        f"- Change it when: {setting.why}",
        f"- Also set by: {', '.join(ways)}\n",
    ]
    return "\n".join(lines)


def _get(config: Config, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


_HEAD = f"""# Settings

<!-- Made by `prefix-proxy config --markdown`; a test compares them. Change proxy/config/, not this page. -->

A flag beats an environment variable, that beats the TOML file, that beats the default. The file is named by `--config`
or `{CONFIG_VARIABLE}`; there is no other place where one is looked for. An empty variable counts as not set; where none
is allowed, the word `none` sets it. A setting or variable that does not exist is an error. `prefix-proxy config` prints
what is in force and where it comes from. Relative paths start from the working directory.
"""

_KEYS = f"""## [[keys]]

{inspect.getdoc(Key)}

```toml
[[keys]]
name = "open-webui"      # shows in logs; the tenant of callers whose user is not known
hash = "sha256$SALT$DIGEST"
trusted = true           # its identity headers count: for Open WebUI's key alone
admin = false            # may call /v1/internal/*
max_output_tokens = 8192 # instead of lengths.max_output_tokens
requests_per_minute = 60 # of all its callers together; above it 429 with Retry-After. None by default, as the next two
tokens_per_minute = 200000 # that vLLM had to compute: prompt without what was cached, and answer
concurrent = 20          # requests at once
```

`prefix-proxy keys NAME` makes a key, prints it once, and prints this table with its hash. Without any key, callers on
this machine are trusted and all others are refused (or served as nobody with `--allow-anonymous`).
"""
