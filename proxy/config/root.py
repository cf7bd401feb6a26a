"""The root of all settings: one frozen object that everything reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from proxy.config import checks, groups, traffic
from proxy.config.coalesce import Coalesce
from proxy.config.setting import Setting
from proxy.config.steps import History, Lengths, Profile, Salt, Steps, Tools, Trim, Volatile

_SAFE = frozenset(
    {"keep_tools", "spell_arguments", "restore_history", "continue_final", "trim_history", "clamp_lengths", "salt"}
)
_ALL = frozenset(Steps.__dataclass_fields__)
STEPS_OF_PROFILE: Mapping[Profile, frozenset[str]] = {
    "off": frozenset(),
    "safe": _SAFE,
    "balanced": _ALL,
    "max": _ALL,
}


@dataclass(frozen=True, slots=True)
class Key:
    """One client's key: a table `[[keys]]`.  Only its hash is known here, as `prefix-proxy keys` prints it."""

    name: str
    hash: str = field(repr=False)
    trusted: bool = False  # may name users and chats in headers: Open WebUI's key
    admin: bool = False  # may call /v1/internal/*
    max_output_tokens: int | None = None  # in place of lengths.max_output_tokens
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # computed by vLLM: prompt without what was cached, and answer
    concurrent: int | None = None  # requests at once


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting in force.  `Config()` holds the defaults."""

    # fmt: off
    database: Annotated[str, Setting(
        "SQLite file of the sessions, or :memory:. A folder that lacks is made.",
        "A restart should remember sessions and keep the salt.", allowed=":memory: or a path",
        check=checks.path, flag="--database",
    )] = ":memory:"
    profile: Annotated[Profile, Setting(
        "How much is rewritten: off nothing; safe moves no text; balanced all steps; max also learns beyond one chat.",
        "To compare, or to begin carefully.", flag="--profile",
    )] = "balanced"
    keys_file: Annotated[str | None, Setting(
        "A TOML file with nothing but [[keys]] tables, read beside those of the main file.",
        "Keys should have an owner and a mode of their own, or come as a mounted secret.", allowed="a path",
        check=checks.path, flag="--keys-file",
    )] = None
    # fmt: on
    upstream: groups.Upstream = field(default_factory=groups.Upstream)
    listen: groups.Listen = field(default_factory=groups.Listen)
    relay: groups.Relay = field(default_factory=groups.Relay)
    drain: groups.Drain = field(default_factory=groups.Drain)
    limits: groups.Limits = field(default_factory=groups.Limits)
    images: groups.Images = field(default_factory=groups.Images)
    models: groups.Models = field(default_factory=groups.Models)
    cors: groups.Cors = field(default_factory=groups.Cors)
    metrics: groups.Metrics = field(default_factory=groups.Metrics)
    identity: groups.Identity = field(default_factory=groups.Identity)
    sessions: groups.Sessions = field(default_factory=groups.Sessions)
    store: groups.Store = field(default_factory=groups.Store)
    log: groups.Log = field(default_factory=groups.Log)
    record: groups.Record = field(default_factory=groups.Record)
    steps: Steps = field(default_factory=Steps)
    tools: Tools = field(default_factory=Tools)
    history: History = field(default_factory=History)
    volatile: Volatile = field(default_factory=Volatile)
    trim: Trim = field(default_factory=Trim)
    salt: Salt = field(default_factory=Salt)
    lengths: Lengths = field(default_factory=Lengths)
    tokens: traffic.Tokens = field(default_factory=traffic.Tokens)
    rates: traffic.Rates = field(default_factory=traffic.Rates)
    admission: traffic.Admission = field(default_factory=traffic.Admission)
    coalesce: Coalesce = field(default_factory=Coalesce)
    keys: tuple[Key, ...] = ()

    def step_on(self, name: str) -> bool:
        """Tell whether the step `name` runs: its own switch, else the profile; in profile off none does."""
        if name not in _ALL:
            raise KeyError(name)
        switch: bool | None = getattr(self.steps, name)
        if self.profile == "off" or switch is None:
            return name in STEPS_OF_PROFILE[self.profile]
        return switch

    def with_values(self, values: Mapping[str, object]) -> "Config":
        """Return a copy with `values` by their path ("relay.keepalive_seconds"), not checked: for tests and tools."""
        changed = self
        for path, value in values.items():
            group, _, name = path.rpartition(".")
            if group:
                changed = replace(changed, **{group: replace(getattr(changed, group), **{name: value})})
            else:
                changed = replace(changed, **{name: value})  # type: ignore[arg-type]  # by name
        return changed
