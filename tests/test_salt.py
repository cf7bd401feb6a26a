"""The salt is the server's: by key, tenant or session, stable, and no caller's (case SC-01)."""

from itertools import product
from typing import Any

import pytest

from proxy.core.draft import Draft, Facts
from proxy.core.ledger import Ledger
from proxy.core.salt import add_salt, salt_for

SECRET = b"s" * 32


def salt(
    isolation: str, *, secret: bytes = SECRET, key: str = "k", keys: int = 2, tenant: str = "t", session: str = "s"
) -> Any:
    """Return the salt of a request."""
    return salt_for(secret, isolation, key=key, keys=keys, tenant=tenant, session=session)


def test_a_salt_is_hex_that_vllm_takes() -> None:
    """At most 128 characters, none of `@ / \\` and NUL; the same every time."""
    for isolation in ("key", "tenant", "session"):
        value = salt(isolation)
        assert len(value) == 64 and int(value, 16) >= 0 and value == salt(isolation)
        assert value != salt(isolation, secret=b"t" * 32)


def test_shared_and_a_single_key_need_none() -> None:
    """All may share then."""
    assert salt("shared") is None and salt("key", keys=1) is None and salt("key", keys=0) is None
    assert salt("tenant", keys=0) is not None


@pytest.mark.parametrize(("isolation", "apart"), [("key", 2), ("tenant", 2), ("session", 4)])
def test_only_the_scope_named_parts_callers(isolation: str, apart: int) -> None:
    """By key: tenants of one key share; by session: not even two chats of one tenant."""
    made = {salt(isolation, key=k, tenant=k + t, session=s) for k, t, s in product("ab", "x", "yz")}
    assert len(made) == apart


def test_scopes_cannot_be_made_to_meet() -> None:
    """A tenant's and a session's name cannot be parted in two ways, nor one isolation's salt be another's."""
    assert salt("session", tenant="a", session="b\x00c") != salt("session", tenant="a\x00b", session="d")
    assert len({salt("key", key="x"), salt("tenant", tenant="x"), salt("session", tenant="", session="x")}) == 3


def test_any_name_has_a_salt() -> None:
    """A lone surrogate too: header values may hold one."""
    assert salt("tenant", tenant="k\x00\udc80")


def sent(rest: dict[str, Any], value: str | None) -> dict[str, Any]:
    """Return the fields that go up."""
    return dict(add_salt(Draft((), (), rest), Facts(frozenset(), Ledger(0), salt=value)).rest)


def test_a_clients_own_salt_never_goes_up() -> None:
    """Replaced, or taken out where all share."""
    assert sent({"cache_salt": "theirs", "a": 1}, "ours") == {"cache_salt": "ours", "a": 1}
    assert sent({"cache_salt": "theirs", "a": 1}, None) == {"a": 1}
    assert sent({"cache_salt": None}, None) == {}
    assert sent({}, "ours") == {"cache_salt": "ours"} and sent({"a": 1}, None) == {"a": 1}


def test_fields_that_only_look_like_a_salt_are_left() -> None:
    """vLLM knows neither: `extra_body` is an SDK's argument, and names count by letter."""
    told = {"extra_body": {"cache_salt": "x"}, "Cache_Salt": "x"}
    assert sent(told, "ours") == {**told, "cache_salt": "ours"}
