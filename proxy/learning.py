"""Lines that proved volatile, beyond one chat (profile max): by the skeleton of the head, per tenant, then for all."""

from collections import OrderedDict

import orjson

from proxy.store.sessions import SessionStore

Pattern = tuple[bytes, frozenset[int]]

TENANTS_FOR_ALL = 3
"""From so many tenants that showed it, a pattern holds for everyone: it is the application's, not one user's."""

MOST_PATTERNS = 1024
META = "learned_lines"


class Learning:
    """What was learned, bounded, the pattern unused longest shed first; kept over a restart as digests and places."""

    def __init__(self, store: SessionStore | None = None) -> None:
        self._store = store
        self._shown: OrderedDict[Pattern, set[bytes]] = OrderedDict()

    async def load(self) -> None:
        """Read what an earlier process learned; what cannot be read is learned anew."""
        raw = await self._store.get_meta(META) if self._store is not None else None
        try:
            rows = orjson.loads(raw) if raw else []
            for skeleton, places, tenants in rows:
                pattern = bytes.fromhex(skeleton), frozenset(int(place) for place in places)
                self._shown[pattern] = {bytes.fromhex(tenant) for tenant in tenants}
        except (ValueError, TypeError):
            self._shown.clear()

    def note(self, tenant: bytes, skeleton: bytes, places: frozenset[int]) -> None:
        """Remember that a chat of `tenant` (digest) showed the lines at `places` of this skeleton to be volatile."""
        pattern = skeleton, places
        shown = self._shown.setdefault(pattern, set())
        self._shown.move_to_end(pattern)
        if tenant in shown or len(shown) >= TENANTS_FOR_ALL:
            return
        shown.add(tenant)
        while len(self._shown) > MOST_PATTERNS:
            self._shown.popitem(last=False)
        if self._store is not None:
            rows = [[s.hex(), sorted(p), [t.hex() for t in who]] for (s, p), who in self._shown.items()]
            self._store.put_meta(META, orjson.dumps(rows))

    def patterns(self, tenant: bytes) -> tuple[Pattern, ...]:
        """Return what holds for a tenant: its own patterns, and those that three tenants showed; newest first."""
        return tuple(
            p for p, shown in reversed(self._shown.items()) if tenant in shown or len(shown) >= TENANTS_FOR_ALL
        )
