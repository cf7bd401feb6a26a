"""Find each setting's value: flag, else environment, else TOML, else default; and check what they make together."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from proxy.config.checks import is_loopback
from proxy.config.keys import check_distinct, keys_from
from proxy.config.root import Config, Key
from proxy.config.setting import ENV_PREFIX, Declared, SettingError, declared
from proxy.config.values import allowed, convert

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings in force, and by path where each comes from, as the user spelled it."""

    config: Config
    origins: Mapping[str, str]

    def spelling(self, path: str) -> str:
        """Name a setting as the user spelled it, or by its path where it has its default."""
        origin = self.origins[path]
        return path if origin == DEFAULT else origin


@dataclass(frozen=True, slots=True)
class _Given:
    value: object
    spelling: str


def load_config(flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Return the checked settings.  `flags` by path ("listen.port"), and "config" for the file; raises SettingError."""
    return load_settings(flags, environ).config


def load_settings(flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """Return the checked settings and their origins.  Raises SettingError with one plain sentence."""
    flags = {} if flags is None else flags
    environ = os.environ if environ is None else environ
    specs = {spec.path: spec for spec in declared(Config)}
    file = str(flags.get("config") or environ.get(CONFIG_VARIABLE) or "")
    tables = _read_toml(file) if file else {}
    key_tables = tables.pop("keys", [])
    given = {**_from_toml(tables, file, specs), **_from_environ(environ, specs), **_from_flags(flags, specs)}
    values = {path: _value(specs[path], one) for path, one in given.items()}
    config = Config().with_values(values)
    config = config.with_values({"keys": keys_from(key_tables, file) + _keys_of_file(config.keys_file)})
    origins = {path: given[path].spelling if path in given else DEFAULT for path in specs}
    loaded = Loaded(config, origins)
    _check_together(loaded)
    return loaded


def _value(spec: Declared, given: _Given) -> object:
    try:
        return convert(spec, given.value)
    except ValueError as error:
        shown = "***" if spec.setting.secret else _shown(given.value)
        raise SettingError(f"{given.spelling} = {shown} cannot be used: {error}; allowed: {allowed(spec)}.") from None


def _shown(value: object) -> str:
    return re.sub(r"//[^/@]*@", "//***@", repr(value))[:200]


def _from_flags(flags: Mapping[str, object], specs: Mapping[str, Declared]) -> dict[str, _Given]:
    return {
        path: _Given(value, specs[path].setting.flag or path)
        for path, value in flags.items()
        if path in specs and value is not None
    }


# Kubernetes gives every container the address of a service named prefix-proxy; the rest is our own tests'.
_NOT_SETTINGS = tuple(
    ENV_PREFIX + name for name in ("SERVICE_HOST", "SERVICE_PORT", "PORT_", "TEST_", "VLLM_CACHE", "OPENWEBUI")
)


def _from_environ(environ: Mapping[str, str], specs: Mapping[str, Declared]) -> dict[str, _Given]:
    known = {name: spec.path for spec in specs.values() for name in spec.envs}
    found: dict[str, _Given] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name == CONFIG_VARIABLE or name.startswith(_NOT_SETTINGS):
            continue
        path = known.get(name)
        if path is None:
            raise SettingError(f"{name}: there is no such setting; {_hint(name, [*known, CONFIG_VARIABLE])}")
        if not text:  # as `NAME=${OTHER:-}` leaves it in compose files
            continue
        if path in found:
            raise SettingError(f"{found[path].spelling} and {name} set the same: keep one of them.")
        found[path] = _Given(text, name)
    return found


def _from_toml(tables: Mapping[str, object], file: str, specs: Mapping[str, Declared]) -> dict[str, _Given]:
    groups = {path.partition(".")[0] for path in specs if "." in path}
    found: dict[str, _Given] = {}
    for name, value in tables.items():
        if name not in groups:
            _add(found, name, value, file, specs)
        elif not isinstance(value, dict):
            raise SettingError(f"{file}: {name} = {_shown(value)} cannot be used: it is a table, write [{name}].")
        else:
            for inner, one in value.items():
                _add(found, f"{name}.{inner}", one, file, specs)
    return found


def _add(found: dict[str, _Given], path: str, value: object, file: str, specs: Mapping[str, Declared]) -> None:
    if path not in specs:
        groups = sorted({one.partition(".")[0] for one in specs})
        raise SettingError(f"{file}: there is no setting {path}; {_hint(path, [*specs, *groups, 'keys'])}")
    found[path] = _Given(value, f"{file}: {path}")


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1, 0.7)
    return f"did you mean {near[0]}?" if near else "`prefix-proxy config` lists all that there are."


def _read_toml(file: str) -> dict[str, object]:
    try:
        return tomllib.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"The file {file} cannot be read: {(error.strerror or 'unknown reason').lower()}.") from None
    except (ValueError, RecursionError) as error:
        place = re.search(r"\(at .*\)$", str(error))  # the rest may quote a secret
        raise SettingError(f"The file {file} is not TOML {place[0] if place else 'in UTF-8'}.") from None


def _keys_of_file(file: str | None) -> tuple[Key, ...]:
    if file is None:
        return ()
    tables = _read_toml(file)
    for name in tables:
        if name != "keys":
            raise SettingError(f"{file}: {name} cannot stand here: the keys file has [[keys]] tables only.")
    return keys_from(tables.get("keys", []), file)


def _check_together(loaded: Loaded) -> None:
    config, sessions, lengths = loaded.config, loaded.config.sessions, loaded.config.lengths
    check_distinct(config.keys)
    _check_listen(loaded)
    if sessions.max_bytes_each > sessions.max_bytes_total:
        most = f"allowed: at most sessions.max_bytes_total, {sessions.max_bytes_total}"
        raise _refused(loaded, "sessions.max_bytes_each", sessions.max_bytes_each, most)
    if (lengths.default_output_tokens or 0) > lengths.max_output_tokens:
        most = f"allowed: at most lengths.max_output_tokens, {lengths.max_output_tokens}"
        raise _refused(loaded, "lengths.default_output_tokens", lengths.default_output_tokens, most)


def _check_listen(loaded: Loaded) -> None:
    listen, metrics, upstream = loaded.config.listen, loaded.config.metrics, loaded.config.upstream
    if not is_loopback(listen.host) and not loaded.config.keys and not listen.allow_anonymous:
        mend = (
            "other machines reach it and no keys are set; add a key (`prefix-proxy keys NAME`), "
            "or give --allow-anonymous, or listen on 127.0.0.1"
        )
        raise _refused(loaded, "listen.host", listen.host, mend)
    if metrics.port is not None and metrics.port == listen.port:
        mend = "the proxy itself listens there; allowed: another port, or none to serve /metrics with the rest"
        raise _refused(loaded, "metrics.port", metrics.port, mend)
    own = {f"http://{name}:{listen.port}" for name in (listen.host, "127.0.0.1", "localhost", "[::1]")}
    if upstream.url in own:
        mend = "that is the proxy's own address; allowed: the address of vLLM"
        raise _refused(loaded, "upstream.url", upstream.url, mend)


def _refused(loaded: Loaded, path: str, value: object, why: str) -> SettingError:
    return SettingError(f"{loaded.spelling(path)} = {value!r} cannot be used: {why}.")
