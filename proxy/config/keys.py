"""The tables `[[keys]]`: who may call.  What a table holds as `hash` is never quoted: it may be a key by mistake."""

import difflib
from collections.abc import Mapping
from dataclasses import fields

from proxy.config import checks
from proxy.config.root import Key
from proxy.config.setting import SettingError

_FIELDS = tuple(field.name for field in fields(Key))


def keys_from(tables: object, where: str) -> tuple[Key, ...]:
    """Read the keys of one file; `where` names it in errors.  Raises SettingError."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SettingError(f"{where}: keys must be tables [[keys]].")
    return tuple(_key(table, f"{where} [[keys]] number {number}") for number, table in enumerate(tables, 1))


def check_distinct(keys: tuple[Key, ...]) -> None:
    """Refuse two keys of one name (a name is a tenant) or of one hash (which of them calls?).  Raises SettingError."""
    for what in ("name", "hash"):
        seen: dict[str, Key] = {}
        for key in keys:
            other = seen.setdefault(getattr(key, what), key)
            if other is not key:
                raise SettingError(f"[[keys]] {other.name} and {key.name} have the same {what}: each needs its own.")


def _key(table: Mapping[str, object], where: str) -> Key:
    for name in table:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"a key has {', '.join(_FIELDS)}."
            raise SettingError(f"{where}: there is no field {name!r}; {hint}")
    return Key(
        name=_text(table, "name", where),
        hash=_text(table, "hash", where),
        trusted=_flag(table, "trusted", where),
        admin=_flag(table, "admin", where),
        max_output_tokens=_number(table, "max_output_tokens", "tokens", where),
        requests_per_minute=_number(table, "requests_per_minute", "requests", where),
        tokens_per_minute=_number(table, "tokens_per_minute", "tokens", where),
        concurrent=_number(table, "concurrent", "requests", where),
    )


def _text(table: Mapping[str, object], field: str, where: str) -> str:
    value = table.get(field)
    if not isinstance(value, str):
        raise SettingError(f"{where}: {field} is missing or not text; `prefix-proxy keys NAME` prints a whole table.")
    try:
        return checks.key_name(value) if field == "name" else checks.key_hash(value)
    except ValueError as error:
        shown = repr(value) if field == "name" else "***"
        raise SettingError(f"{where}: {field} = {shown} cannot be used: {error}.") from None


def _flag(table: Mapping[str, object], field: str, where: str) -> bool:
    value = table.get(field, False)
    if not isinstance(value, bool):
        raise SettingError(f"{where}: {field} = {value!r} cannot be used: allowed is true or false.")
    return value


def _number(table: Mapping[str, object], field: str, unit: str, where: str) -> int | None:
    value = table.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100_000_000:
        raise SettingError(
            f"{where}: {field} = {value!r} cannot be used: allowed is a whole number of {unit} from 1 to 100,000,000."
        )
    return value
