"""The signed user: only Open WebUI's signature counts, only in its time, only with its algorithm."""

import base64
import json
import time
from typing import Any

import jwt
import pytest

from proxy.downstream.signed import LEEWAY_SECONDS, signed_user

SECRET = "a secret of at least 32 characters"


def token(secret: str = SECRET, algorithm: str = "HS256", **claims: Any) -> str:
    """Return a token; `exp` and `sub` as in Open WebUI unless given, left out where None."""
    held = {"sub": "u1", "exp": time.time() + 300, **claims}
    return jwt.encode({k: v for k, v in held.items() if v is not None}, secret, algorithm=algorithm)


def test_a_signed_user_is_known() -> None:
    """By `sub`."""
    assert signed_user(token(), SECRET) == "u1"
    assert signed_user(token(exp=time.time() - LEEWAY_SECONDS / 2), SECRET) == "u1"


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": 1.0},
        {"exp": None},
        {"sub": None},
        {"sub": 3},
        {"sub": ["u1"]},
        {"nbf": time.time() + 900},
        {"exp": "soon"},
    ],
)
def test_a_token_out_of_its_time_or_without_its_claims_proves_nothing(claims: dict[str, Any]) -> None:
    """Nor does one whose user is no text."""
    assert signed_user(token(**claims), SECRET) is None


def test_another_secret_or_algorithm_proves_nothing() -> None:
    """`none` least of all."""
    assert signed_user(token("another secret of 32 characters!!"), SECRET) is None
    assert signed_user(token("x" * 64, "HS512"), "x" * 64) is None
    head, body = ({"alg": "none", "typ": "JWT"}, {"sub": "u1", "exp": time.time() + 300})
    unsigned = (
        ".".join(base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=").decode() for p in (head, body)) + "."
    )
    assert signed_user(unsigned, SECRET) is None
    sound = token()
    assert signed_user(sound[:-3] + ("AAA" if sound[-3:] != "AAA" else "BBB"), SECRET) is None


@pytest.mark.parametrize("odd", [None, "", "x", "a.b.c", "...", "\udc80.a.b", "é.é.é", "a" * 10_000])
def test_what_is_no_token_proves_nothing(odd: str | None) -> None:
    """Any bytes may stand in a header."""
    assert signed_user(odd, SECRET) is None


def test_without_a_secret_nobody_is_proven() -> None:
    """The empty one is none."""
    assert signed_user(token(), None) is None and signed_user(token(), "") is None


def test_an_empty_user_proves_nothing() -> None:
    """It would be the tenant of everybody without a name."""
    assert signed_user(token(sub=""), SECRET) is None
