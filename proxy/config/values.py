"""From what a user wrote (text of a flag or variable, or a TOML value) to a value of the setting's type."""

import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from proxy.config.setting import Declared, Setting

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


def convert(spec: Declared, value: object) -> object:
    """Return `value` in the setting's type, within its range and normalised; raise ValueError with the reason."""
    kind, optional = _unwrap(spec.kind)
    if optional and (value is None or value == "none"):
        return None
    converted = _typed(kind, spec.setting, value)
    return spec.setting.check(converted) if spec.setting.check is not None else converted


def allowed(spec: Declared) -> str:
    """Say in words which values a setting takes."""
    kind, optional = _unwrap(spec.kind)
    words = spec.setting.allowed or _kind_in_words(kind, spec.setting)
    if get_origin(kind) is tuple:
        words = f"a list of {words} (in text separated by commas)"
    return words + (", or none" if optional else "")


def _unwrap(kind: Any) -> tuple[Any, bool]:
    if isinstance(kind, UnionType):
        inner = [part for part in get_args(kind) if part is not NoneType]
        return inner[0], True
    return kind, False


def _kind_in_words(kind: Any, setting: Setting) -> str:
    if get_origin(kind) is Literal:
        *first, last = (str(word) for word in get_args(kind))
        return f"{', '.join(first)} or {last}"
    if kind is bool:
        return "true or false"
    number = {int: "a whole number", float: "a number"}.get(kind)
    if number is not None:
        unit = f" of {setting.unit}" if setting.unit else ""
        return f"{number}{unit} from {setting.low:,} to {setting.high:,}"
    if get_origin(kind) is Mapping:
        return f"a table of names and whole numbers from {setting.low:,} to {setting.high:,} (in text name=number,...)"
    return "text"


def _typed(kind: Any, setting: Setting, value: object) -> object:
    if kind is bool:
        return _boolean(value)
    if kind is int or kind is float:
        return _number(kind, setting, value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError("it is none of these")
        return value
    if get_origin(kind) is tuple:
        return _texts(value)
    if get_origin(kind) is Mapping:
        return _table(setting, value)
    if not isinstance(value, str):
        raise ValueError("it is not text")
    return value


def _boolean(value: object) -> bool:
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    if not isinstance(value, bool):
        raise ValueError("it is neither true nor false")
    return value


def _number(kind: type[int] | type[float], setting: Setting, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("it is not a number")
    if kind is int and isinstance(value, float):
        raise ValueError("it is not a whole number")
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        raise ValueError("it is not a whole number" if kind is int else "it is not a number") from None
    if not math.isfinite(number):
        raise ValueError("it is not a finite number")
    if setting.low is not None and number < setting.low:
        raise ValueError("it is too small")
    if setting.high is not None and number > setting.high:
        raise ValueError("it is too large")
    return number


def _texts(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError("it is not a list of texts")
    return tuple(part.strip() for part in parts if part.strip())


def _table(setting: Setting, value: object) -> dict[str, int]:
    if isinstance(value, str):
        pairs = [part.rpartition("=") for part in value.split(",") if part.strip()]
        value = {name.strip(): number.strip() for name, _, number in pairs}
    if not isinstance(value, dict) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("it is not a table")
    return {name: int(_number(int, setting, number)) for name, number in value.items()}
