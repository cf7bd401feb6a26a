"""The internal routes: what is remembered, and forgetting it.  An admin key is needed, and no page of another site."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import orjson
from aiohttp import web

from proxy.core.past import Outcome
from proxy.core.reject import Reject
from proxy.downstream.auth import require_admin
from proxy.downstream.body import read_body
from proxy.downstream.errors import json_response
from proxy.downstream.middlewares import expect_body
from proxy.downstream.origin import refuse_foreign_pages
from proxy.explaining import described
from proxy.state import CALLER, STATE, State
from proxy.store import SessionInfo

CLEAR_PATH = "/v1/internal/session/clear"
LIST_PATH = "/v1/internal/sessions"
_BODY_BYTES = 4096
MOST_LISTED = 1000
_DEFAULT_LIMIT = 100
# vLLM drops its cache at once, but its API server may be busy with a long prompt.
_RESET_SECONDS = 10.0
_USAGE = (
    "The body must be empty or {} for expired sessions, "
    '{"session": "ID"} for one, {"all": true} for all, or {"all": true, "upstream_cache": true}.'
)


class SessionTable(Protocol):
    """What these routes ask of the table of sessions."""

    def list(self) -> Sequence[SessionInfo]:
        """Describe all sessions, the one used last first."""

    def get(self, id: str, /) -> SessionInfo | None:
        """Describe one."""

    async def stored(self) -> Sequence[SessionInfo]:
        """Describe those that are only in the store: a restart brought nobody back to them yet."""

    def exchanges(self, id: str, /) -> Sequence[Outcome]:
        """Return what became of the last exchanges of a live one, oldest first."""

    async def clear(self, *, id: str | None = None, everything: bool = False) -> int:
        """Forget one session, all, or (neither given) the expired ones; return how many there were."""


def add_routes(app: web.Application) -> None:
    """Add /v1/internal/* to the app."""
    router = app.router
    router.add_post(CLEAR_PATH, clear, expect_handler=expect_body)
    router.add_get(LIST_PATH, list_sessions, expect_handler=expect_body)
    router.add_get(LIST_PATH + "/{id:[0-9a-f]{32}}", get_session, expect_handler=expect_body)


async def clear(request: web.Request) -> web.Response:
    """Forget expired sessions, one or all; raises Reject 400 for any other body, 401 or 403 without the right to it."""
    state = _admitted(request)
    wanted = _wanted(await read_body(request, _BODY_BYTES, seconds=state.config.limits.body_seconds))
    table: SessionTable = state.sessions
    session = wanted.get("session")
    answer: dict[str, object] = {"status": "success"}
    if wanted:
        state.last_texts.clear()  # those of other sessions too: they only make an explanation more exact
    answer["cleared"] = await table.clear(
        id=session if isinstance(session, str) else None, everything=wanted.get("all") is True
    )
    if wanted.get("upstream_cache") is True:
        answer["upstream_cache"] = await _reset_upstream(state)
    return json_response(answer)


async def list_sessions(request: web.Request) -> web.Response:
    """List sessions, the one used last first: `limit` (1 to 1000, 100) and `model` narrow it.  No text is in it."""
    table: SessionTable = _admitted(request).sessions
    limit, model = _limit(request.query.get("limit")), request.query.get("model")
    every = [*table.list(), *await table.stored()]
    found = [info for info in every if model is None or info.model == model]
    return json_response({"sessions": [as_json(info) for info in found[:limit]], "total": len(found)})


async def get_session(request: web.Request) -> web.Response:
    """Describe one session, its last exchanges with it; raises Reject 404 if it is not known."""
    table: SessionTable = _admitted(request).sessions
    id = request.match_info["id"]
    info = table.get(id) or next((each for each in await table.stored() if each.id == id), None)
    if info is None:
        raise Reject(404, "There is no session with this id.", code="not_found")
    return json_response({**as_json(info), "exchanges": [described(each) for each in table.exchanges(id)]})


def as_json(info: SessionInfo) -> dict[str, object]:
    """Return a session as the routes and the command print it: times in wall seconds, `expires_seconds` from now."""
    return {
        "id": info.id,
        "model": info.model,
        "turns": info.turns,
        "created": round(info.created, 3),
        "last_seen": round(info.last_seen, 3),
        "expires_seconds": round(info.expires_seconds, 3),
        "bytes": info.size_bytes,
    }


def _admitted(request: web.Request) -> State:
    state = request.app[STATE]
    refuse_foreign_pages(request, state.config)
    require_admin(request[CALLER])
    return state


def _wanted(body: bytes) -> Mapping[str, object]:
    """Return the body if it is one of the four that are allowed: a slip must not clear more than was meant."""
    if not body.strip():
        return {}
    try:
        wanted = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Reject(400, _USAGE, code="invalid_body") from None
    if isinstance(wanted, dict):
        names = wanted.keys()
        if not names or (names == {"session"} and isinstance(wanted["session"], str) and wanted["session"]):
            return wanted
        if wanted.get("all") is True and (
            names == {"all"} or (names == {"all", "upstream_cache"} and isinstance(wanted["upstream_cache"], bool))
        ):
            return wanted
    raise Reject(400, _USAGE, code="invalid_body")


def _limit(given: str | None) -> int:
    if given is None:
        return _DEFAULT_LIMIT
    if given.isascii() and given.isdigit() and len(given) < 8 and 1 <= int(given) <= MOST_LISTED:
        return int(given)
    raise Reject(400, f"limit must be a whole number from 1 to {MOST_LISTED}.", param="limit", code="invalid_limit")


async def _reset_upstream(state: State) -> bool:
    """Ask vLLM to drop its cache; it has this route only with VLLM_SERVER_DEV_MODE=1."""
    answer = await state.upstream.fetch("POST", "/reset_prefix_cache", seconds=_RESET_SECONDS, limit_bytes=_BODY_BYTES)
    return answer is not None and answer[0] == 200
