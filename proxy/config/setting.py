"""What is known of one setting beside its type and default: said once here, read by every way to set or show it."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

ENV_PREFIX = "PREFIX_PROXY_"


class SettingError(ValueError):
    """A setting that cannot be used.  Its text is one plain sentence without secrets, fit for the terminal."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration that stands in a field's `Annotated`: `help` says what it is, `why` when one would change it."""

    help: str
    why: str
    unit: str = ""
    low: float | None = None  # smallest and largest number allowed, both included
    high: float | None = None
    allowed: str = ""  # in words, where type and range do not say it
    check: Callable[[Any], object] | None = None  # returns the value as it is kept; raises ValueError
    secret: bool = False
    flag: str | None = None  # only for what one sets often, never for a secret: a command line is seen by all
    short: str | None = None  # second, shorter environment variable


@dataclass(frozen=True, slots=True)
class Declared:
    """One setting with its place in `Config`."""

    path: str  # as in TOML: "listen.port"
    kind: Any  # its type, without the annotation
    default: object
    setting: Setting

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.path.replace(".", "_").upper()

    @property
    def envs(self) -> tuple[str, ...]:
        """Every variable that sets it, the short form first."""
        return (self.setting.short, self.env) if self.setting.short else (self.env,)


def _default(field: Field[Any]) -> object:
    if field.default is not MISSING:
        return field.default
    assert field.default_factory is not MISSING, f"{field.name} needs a default"
    return field.default_factory()


def declared(group: type, prefix: str = "") -> Iterator[Declared]:
    """Yield the settings of a dataclass and of the groups in it, in the order they are written."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind, *notes = get_args(hint)
            found = next((note for note in notes if isinstance(note, Setting)), None)
            if found is not None:
                yield Declared(prefix + field.name, kind, _default(field), found)
        elif isinstance(hint, type) and is_dataclass(hint):
            yield from declared(hint, f"{prefix}{field.name}.")
