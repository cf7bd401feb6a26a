"""The signed user that Open WebUI sends in place of plain headers (FORWARD_USER_INFO_HEADER_JWT_SECRET)."""

import jwt

LEEWAY_SECONDS = 30


def signed_user(token: str | None, secret: str | None) -> str | None:
    """Return the user id (`sub`) of an unexpired token that Open WebUI signed with `secret` (HS256); else None."""
    if not token or not secret:
        return None
    try:
        claims = jwt.decode(
            token, secret, algorithms=["HS256"], leeway=LEEWAY_SECONDS, options={"require": ["exp", "sub"]}
        )
    except (jwt.InvalidTokenError, UnicodeError):  # UnicodeError: a header may hold any bytes
        return None
    return str(claims["sub"]) or None
