"""Step `salt`: `cache_salt` by the server's rule, so that only those who may share a cached prefix do."""

import hashlib
import hmac
from dataclasses import replace

from proxy.core.draft import Draft, Facts
from proxy.core.text import encoded


def salt_for(secret: bytes, isolation: str, *, key: str, keys: int, tenant: str, session: str) -> str | None:
    """Return the salt of a request: 64 hex digits, or None where all share.

    `isolation`: `key` (one key or none: no salt), `tenant`, `session` (its digest in hex) or `shared`.  An HMAC under
    the server's secret, so that nobody can compute another's (CVE-2025-46570); vLLM 0.32 takes at most 128 characters
    and none of `@ / \\` and NUL, which hex never holds.
    """
    if isolation == "shared" or (isolation == "key" and keys < 2):
        return None
    scope = {"key": key, "tenant": tenant, "session": f"{tenant}\x00{session}"}[isolation]
    return hmac.new(secret, encoded(f"salt\x00{isolation}\x00{scope}"), hashlib.sha256).hexdigest()


def add_salt(draft: Draft, facts: Facts) -> Draft:
    """Set `cache_salt`; a client's own value never goes up, for it could name another tenant's."""
    if facts.salt is None:
        if "cache_salt" not in draft.rest:
            return draft
        return replace(draft, rest={key: value for key, value in draft.rest.items() if key != "cache_salt"})
    return replace(draft, rest={**draft.rest, "cache_salt": facts.salt})
