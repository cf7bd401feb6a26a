"""Settings: who wins, what is refused and in which words, what is shown, and that the reference is current."""

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config import STEPS_OF_PROFILE, Config, Key, SettingError, load_config, load_settings
from proxy.config.checks import is_loopback, upstream_url
from proxy.config.setting import declared
from proxy.config.show import markdown, rows
from proxy.downstream.auth import hash_token

HASH = hash_token("a key of the tests", b"0" * 16)
SPECS = list(declared(Config))


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """A file to write settings into."""
    return tmp_path / "proxy.toml"


def refusal(flags: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> str:
    """Return the words with which these settings are refused."""
    with pytest.raises(SettingError) as caught:
        load_config(flags or {}, environ or {})
    return str(caught.value)


def in_file(toml: Path, text: str) -> dict[str, object]:
    """Write `text` into the file and return the flags that name it."""
    toml.write_text(text)
    return {"config": str(toml)}


def test_without_any_setting_the_defaults_hold() -> None:
    assert load_config({}, {}) == Config()


def test_a_flag_beats_the_environment_that_beats_the_file_that_beats_the_default(toml: Path) -> None:
    file = in_file(toml, 'profile = "safe"\n[listen]\nport = 9003\n[relay]\nkeepalive_seconds = 3\n')
    environ = {"PREFIX_PROXY_PORT": "9002", "PREFIX_PROXY_PROFILE": "max"}
    loaded = load_settings({**file, "listen.port": "9001"}, environ)
    assert (loaded.config.listen.port, loaded.config.profile, loaded.config.relay.keepalive_seconds) == (9001, "max", 3)
    assert loaded.origins["listen.port"] == "--port"
    assert loaded.origins["profile"] == "PREFIX_PROXY_PROFILE"
    assert loaded.origins["relay.keepalive_seconds"] == f"{toml}: relay.keepalive_seconds"
    assert loaded.origins["listen.host"] == "default"


def test_the_file_can_be_named_by_a_variable(toml: Path) -> None:
    in_file(toml, "[drain]\nseconds = 7\n")
    assert load_config({}, {"PREFIX_PROXY_CONFIG": str(toml)}).drain.seconds == 7.0


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.path)
def test_every_setting_takes_its_own_default_from_its_variable(spec: object) -> None:
    """What `text` prints is what a variable takes, for each setting."""
    from proxy.config.setting import Declared
    from proxy.config.show import text

    assert isinstance(spec, Declared)
    shown = "" if spec.default in ((), {}) else text(spec.default)
    assert load_config({}, {spec.env: shown}) == Config()


def test_every_setting_says_what_it_is_and_why_one_would_change_it() -> None:
    for spec in SPECS:
        assert spec.setting.help.endswith(".") and spec.setting.why.endswith("."), spec.path
        assert not (spec.setting.secret and spec.setting.flag), f"{spec.path}: a command line is seen by all"
        if "seconds" in spec.path or "bytes" in spec.path:
            assert spec.setting.unit in ("seconds", "bytes"), spec.path


def test_each_flag_and_each_variable_sets_one_setting() -> None:
    flags = [spec.setting.flag for spec in SPECS if spec.setting.flag]
    names = [name for spec in SPECS for name in spec.envs]
    assert len(set(flags)) == len(flags) and len(set(names)) == len(names)


def test_text_becomes_lists_tables_switches_and_none() -> None:
    environ = {
        "PREFIX_PROXY_CORS_ORIGINS": "https://a.example, https://b.example:8443",
        "PREFIX_PROXY_LENGTHS_MODELS": "org/model=4096,other=8",
        "PREFIX_PROXY_STEPS_SALT": "off",
        "PREFIX_PROXY_STEPS_KEEP_TOOLS": "none",
        "PREFIX_PROXY_STORE_TEXT": "1",
        "PREFIX_PROXY_LENGTHS_DEFAULT_OUTPUT_TOKENS": "",
    }
    config = load_config({}, environ)
    assert config.cors.origins == ("https://a.example", "https://b.example:8443")
    assert config.lengths.models == {"org/model": 4096, "other": 8}
    assert (config.steps.salt, config.steps.keep_tools, config.store.text) == (False, None, True)
    assert config.lengths.default_output_tokens is None


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://gpu.example/vllm/v1", "https://gpu.example/vllm"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("unix:/run/vllm.sock", "unix:/run/vllm.sock"),
        ("unix:///run/vllm.sock", "unix:/run/vllm.sock"),
    ],
)
def test_an_upstream_address_is_kept_in_one_form(written: str, kept: str) -> None:
    assert upstream_url(written) == kept == upstream_url(kept)


@given(st.text(max_size=60))
def test_any_text_is_an_upstream_address_or_refused_plainly(text: str) -> None:
    """No other error comes out than the one that is turned into a sentence."""
    with contextlib.suppress(ValueError):
        assert upstream_url(text).startswith(("http://", "https://", "unix:/"))


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ({"listen.port": "99999"}, {}, ["--port", "'99999'", "0 to 65,535"]),
        ({"listen.port": "80.5"}, {}, ["--port", "'80.5'", "whole number"]),
        ({}, {"PREFIX_PROXY_LISTEN_PORT": "x"}, ["PREFIX_PROXY_LISTEN_PORT", "'x'", "whole number"]),
        ({"profile": "fast"}, {}, ["--profile", "'fast'", "off, safe, balanced or max"]),
        ({}, {"PREFIX_PROXY_DRAIN_SECONDS": "nan"}, ["PREFIX_PROXY_DRAIN_SECONDS", "'nan'", "seconds from 0"]),
        ({}, {"PREFIX_PROXY_STORE_TEXT": "maybe"}, ["PREFIX_PROXY_STORE_TEXT", "'maybe'", "true or false"]),
        ({"upstream.url": "127.0.0.1:8000"}, {}, ["--upstream", "did you mean http://127.0.0.1:8000?"]),
        ({"upstream.url": "ftp://host"}, {}, ["--upstream", "'ftp://host'", "http://HOST:PORT"]),
        ({"upstream.url": "http://host:port"}, {}, ["--upstream", "'http://host:port'"]),
        ({"upstream.url": "http://localhost:9000/v1"}, {}, ["--upstream", "proxy's own address"]),
        ({}, {"PREFIX_PROXY_CORS_ORIGINS": "https://a.example/"}, ["CORS_ORIGINS", "trailing slash"]),
        ({}, {"PREFIX_PROXY_LENGTHS_MODELS": "m=0"}, ["PREFIX_PROXY_LENGTHS_MODELS", "too small", "from 1 to"]),
        ({}, {"PREFIX_PROXY_IDENTITY_USER_HEADER": "X User"}, ["IDENTITY_USER_HEADER", "'X User'", "header"]),
        ({}, {"PREFIX_PROXY_SESSIONS_MAX_BYTES_TOTAL": "4096"}, ["sessions.max_bytes_each", "4096", "at most"]),
        ({}, {"PREFIX_PROXY_LENGTHS_DEFAULT_OUTPUT_TOKENS": "9000"}, ["DEFAULT_OUTPUT_TOKENS", "9000", "8192"]),
        ({"metrics.port": "9000"}, {}, ["--metrics-port", "9000", "another port"]),
        ({"config": "/nowhere/proxy.toml"}, {}, ["/nowhere/proxy.toml", "no such file"]),
    ],
)
def test_a_refusal_names_the_setting_as_the_user_spelled_it_the_value_and_what_is_allowed(
    flags: dict[str, object], environ: dict[str, str], words: list[str]
) -> None:
    said = refusal(flags, environ)
    assert all(word in said for word in words), said
    assert "\n" not in said


def test_a_misspelt_variable_is_refused_with_a_suggestion() -> None:
    assert "did you mean PREFIX_PROXY_UPSTREAM?" in refusal(environ={"PREFIX_PROXY_UPSTREM": "http://a"})
    assert "`prefix-proxy config`" in refusal(environ={"PREFIX_PROXY_ZZZZZZZZ": "1"})


def test_the_short_and_the_long_variable_of_one_setting_are_refused_together() -> None:
    said = refusal(environ={"PREFIX_PROXY_PORT": "1", "PREFIX_PROXY_LISTEN_PORT": "2"})
    assert "PREFIX_PROXY_LISTEN_PORT and PREFIX_PROXY_PORT set the same" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[listen]\nprot = 1\n", ["listen.prot", "did you mean listen.port?"]),
        ("[listne]\nport = 1\n", ["listne", "did you mean listen?"]),
        ("porfile = 'safe'\n", ["porfile", "did you mean profile?"]),
        ("listen = 9000\n", ["listen = 9000", "[listen]"]),
        ("[listen]\nport = '9001 '\nhost = 5\n", ["listen.host = 5", "not text"]),
        ("[listen]\nport = true\n", ["listen.port = True", "whole number"]),
        ("[listen\n", ["is not TOML", "line 1"]),
        ("[cors]\norigins = [1]\n", ["cors.origins", "list"]),
        ("keys = 3\n", ["[[keys]]"]),
        ("[[keys]]\nname = 'a'\n", ["number 1", "hash is missing", "prefix-proxy keys"]),
        ("[[keys]]\nname = 'a b'\nhash = 'x'\n", ["name = 'a b'", "letters"]),
        ("[[keys]]\nname = 'local'\nhash = 'x'\n", ["name = 'local'"]),
        ("[[keys]]\nname = 'a'\nhash = 'my-plain-key'\n", ["hash = ***", "another form"]),
        (f"[[keys]]\nname = 'a'\nhash = '{HASH}'\nadmn = true\n", ["'admn'", "did you mean admin?"]),
        (f"[[keys]]\nname = 'a'\nhash = '{HASH}'\nadmin = 1\n", ["admin = 1", "true or false"]),
        (f"[[keys]]\nname = 'a'\nhash = '{HASH}'\nmax_output_tokens = 0\n", ["max_output_tokens = 0", "from 1"]),
        (f"[[keys]]\nname = 'a'\nhash = '{HASH}'\n" * 2, ["a and a", "same name"]),
        ("".join(f"[[keys]]\nname = '{name}'\nhash = '{HASH}'\n" for name in "ab"), ["a and b", "same hash"]),
    ],
)
def test_a_mistake_in_the_file_is_refused_with_its_place(toml: Path, text: str, words: list[str]) -> None:
    said = refusal(in_file(toml, text))
    assert all(word in said for word in words), said
    assert "my-plain-key" not in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "chat.example"])
def test_an_address_that_others_reach_needs_keys_or_the_word_of_the_operator(toml: Path, host: str) -> None:
    said = refusal({"listen.host": host})
    assert "--host" in said and host in said and "--allow-anonymous" in said
    assert load_config({"listen.host": host, "listen.allow_anonymous": True}, {}).listen.host == host
    keyed = in_file(toml, f"[[keys]]\nname = 'webui'\nhash = '{HASH}'\n")
    assert load_config({**keyed, "listen.host": host}, {}).keys == (Key("webui", HASH),)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "[::1]"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert is_loopback(load_config({"listen.host": host}, {}).listen.host)


def test_keys_of_the_file_and_of_the_keys_file_count_together(toml: Path, tmp_path: Path) -> None:
    other = hash_token("another key", b"1" * 16)
    (tmp_path / "keys.toml").write_text(f"[[keys]]\nname = 'two'\nhash = '{other}'\ntrusted = true\n")
    flags = in_file(toml, f"keys_file = '{tmp_path / 'keys.toml'}'\n[[keys]]\nname = 'one'\nhash = '{HASH}'\n")
    assert load_config(flags, {}).keys == (Key("one", HASH), Key("two", other, trusted=True))


def test_a_keys_file_with_other_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("profile = 'safe'\n")
    assert "[[keys]] tables only" in refusal({"keys_file": str(tmp_path / "keys.toml")})


SECRETS = {
    "PREFIX_PROXY_UPSTREAM_API_KEY": "canary-upstream-key",
    "PREFIX_PROXY_IDENTITY_JWT_SECRET": "canary-jwt-secret",
    "PREFIX_PROXY_SALT_SECRET": "canary-salt-secret-of-length",
    "PREFIX_PROXY_METRICS_TOKEN_HASH": HASH,
}


def test_secrets_are_shown_masked_with_their_origin(toml: Path) -> None:
    flags = in_file(toml, f"[[keys]]\nname = 'webui'\nhash = '{hash_token('x')}'\ntrusted = true\n")
    loaded = load_settings(flags, SECRETS)
    shown = json.dumps([(row.path, row.value, row.origin) for row in rows(loaded)])
    assert not any(secret in shown for secret in SECRETS.values()) and "sha256$" not in shown
    assert json.dumps(["upstream.api_key", "***", "PREFIX_PROXY_UPSTREAM_API_KEY"]) in shown
    assert json.dumps(["keys.webui", "*** trusted", "[[keys]]"]) in shown


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_a_refused_secret_is_not_quoted(name: str) -> None:
    said = refusal(environ={name: "\tca\tna\try" if name != "PREFIX_PROXY_IDENTITY_JWT_SECRET" else "\0canary"})
    assert name in said and "na" not in said.split(" = ")[1].split(" cannot")[0] and "***" in said


def test_a_key_in_the_upstream_address_is_refused_and_not_quoted() -> None:
    said = refusal({"upstream.url": "http://user:canary@host:8000"})
    assert "canary" not in said and "upstream.api_key" in said


def test_a_file_that_is_no_toml_is_not_quoted(toml: Path) -> None:
    assert "canary" not in refusal(in_file(toml, "[salt]\nsecret = canary-secret\n"))


def test_profiles_turn_steps_on_and_a_switch_beats_them_except_in_off() -> None:
    config = Config()
    assert all(config.step_on(name) for name in STEPS_OF_PROFILE["balanced"])
    safe = config.with_values({"profile": "safe", "steps.salt": False, "steps.move_volatile": True})
    assert (safe.step_on("keep_tools"), safe.step_on("salt"), safe.step_on("move_volatile")) == (True, False, True)
    assert not safe.step_on("rank")
    off = config.with_values({"profile": "off", "steps.salt": True})
    assert not any(off.step_on(name) for name in STEPS_OF_PROFILE["max"])
    with pytest.raises(KeyError):
        config.step_on("no_such_step")


def test_settings_cannot_be_changed_once_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().listen.port = 1  # type: ignore[misc]  # the point of the test


def test_the_reference_of_settings_is_current() -> None:
    """deploy/CONFIG.md is what `prefix-proxy config --markdown` prints."""
    page = Path(__file__).parent.parent / "deploy" / "CONFIG.md"
    assert page.read_text() == markdown()
    assert all(f"### `{spec.path}`" in markdown() for spec in SPECS)


@pytest.mark.parametrize("field", ["requests_per_minute", "tokens_per_minute", "concurrent"])
def test_a_key_may_have_rates_of_its_own(tmp_path: Path, field: str) -> None:
    """Whole numbers above 0, shown beside its name."""
    file = tmp_path / "keys.toml"
    table = f'[[keys]]\nname = "a"\nhash = "{hash_token("sk-a")}"\n'
    file.write_text(f"{table}{field} = 5\n")
    (key,) = load_config({"config": str(file)}, {}).keys
    assert getattr(key, field) == 5
    for wrong in ("0", "-1", "1.5", "true", '"5"'):
        file.write_text(f"{table}{field} = {wrong}\n")
        with pytest.raises(SettingError, match=field):
            load_config({"config": str(file)}, {})


@pytest.mark.parametrize(
    "name", ["SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_9000_TCP_ADDR", "TEST_SHARED", "VLLM_CACHE", "OPENWEBUI"]
)
def test_variables_of_others_that_begin_alike_are_no_settings(name: str) -> None:
    """Kubernetes sets some for a service named prefix-proxy, and our own tests are told things so."""
    assert load_config(environ={f"PREFIX_PROXY_{name}": "tcp://10.0.0.1:9000"}) == Config()
