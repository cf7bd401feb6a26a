"""What the status page shows: counts, times and causes of one moment; no text, no user, no key."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import islice

from proxy.core.past import Outcome
from proxy.state import RECEIVED_AT, STARTED, State
from proxy.store.rows import SessionInfo
from proxy.upstream.gauges import Gauges, parse_gauges

SHOWN_CHATS = 50
SHOWN_REQUESTS = 20
GAUGES_SECONDS = 2.0
"""How often vLLM is asked for its state, while somebody looks."""

_METRICS_BYTES = 8 * 1024 * 1024
_COUNTED = (
    "proxy_requests", "proxy_prompt_tokens", "proxy_cached_tokens", "proxy_generated_tokens", "proxy_trail_steps",
    "proxy_limited_answers", "proxy_aborts", "proxy_coalesced", "proxy_predicted_cached_tokens",
    "proxy_actual_cached_tokens", "proxy_upstream_restarts",
)  # fmt: skip


def _version() -> str:
    try:
        return metadata.version("prefix-proxy")
    except metadata.PackageNotFoundError:
        return "unknown"


# Read with the module: nothing may read a file while the loop runs.
_VERSION = _version()


class Overview:
    """One per app: asks vLLM and counts at most once per interval, however many look."""

    def __init__(self, state: State, *, seconds: float = 1.0) -> None:
        """`seconds`: how old a moment may be."""
        self._state, self._seconds = state, seconds
        self._made_at = self._asked_at = -1e9
        self._moment: Mapping[str, object] = {}
        self._gauges = Gauges()
        self._lock = asyncio.Lock()

    async def now(self) -> Mapping[str, object]:
        """Return what is shown now."""
        async with self._lock:
            if time.monotonic() - self._made_at >= self._seconds * 0.9:
                well = await self._state.vllm.healthy()
                await self._ask(well)
                self._moment, self._made_at = _moment(self._state, self._gauges, well), time.monotonic()
            return self._moment

    async def _ask(self, well: bool) -> None:
        if time.monotonic() - self._asked_at < GAUGES_SECONDS:
            return
        self._asked_at = time.monotonic()
        answer = None
        if well:
            fetch = self._state.upstream.fetch
            answer = await fetch("GET", "/metrics", seconds=GAUGES_SECONDS, limit_bytes=_METRICS_BYTES)
        self._gauges = parse_gauges(answer[2]) if answer is not None and answer[0] == 200 else Gauges()


def _moment(state: State, gauges: Gauges, well: bool) -> Mapping[str, object]:
    latest = state.sessions.latest(SHOWN_CHATS)
    now = time.time()
    return {
        "version": _VERSION,
        "at": round(now, 3),
        "profile": state.config.profile,
        "draining": state.draining,
        "store": "degraded" if state.store is not None and state.store.degraded else "ok",
        "vllm": {
            "state": "ok" if well else "down",
            "models": [{"name": name, "tokens": state.models.max_model_len(name)} for name in state.models.names()],
            "running": gauges.running,
            "waiting": gauges.waiting,
            "kv_cache_usage": gauges.kv_cache_usage,
        },
        "totals": _totals(state),
        "in_flight": _in_flight(state),
        "chats": {"live": state.sessions.live, "shown": [_chat(info, past, now) for info, past in latest]},
    }


def _totals(state: State) -> Mapping[str, int]:
    """Return the counters since the start, summed over their labels."""
    found = {name.removeprefix("proxy_"): 0.0 for name in _COUNTED if name != "proxy_trail_steps"}
    for family in state.metrics.registry.restricted_registry([f"{name}_total" for name in _COUNTED]).collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                key = sample.name.removeprefix("proxy_").removesuffix("_total")
                if key == "requests" and sample.labels["route"] not in ("/v1/chat/completions", "/v1/completions"):
                    continue
                key = f"step_{sample.labels['step']}" if key == "trail_steps" else key
                found[key] = found.get(key, 0) + sample.value
    names = {"trims": "step_trim_history", "clamps": "step_clamp_lengths", "tokens_saved": "cached_tokens"}
    found |= {name: found.get(source, 0) for name, source in names.items()}
    return {key: int(value) for key, value in found.items() if not key.startswith("step_")}


def _in_flight(state: State) -> Mapping[str, object]:
    requests = state.presence.requests()
    now = asyncio.get_running_loop().time()
    rows = sorted(
        ((round(now - request[RECEIVED_AT], 1), request.path, STARTED in request) for request in requests), reverse=True
    )
    return {
        "running": len(rows),
        "waiting": state.admission.waiting,
        "held": len(state.holding),
        "shown": [
            {"route": route, "seconds": seconds, "answering": answering}
            for seconds, route, answering in islice(rows, SHOWN_REQUESTS)
        ],
    }


def _chat(info: SessionInfo, past: Sequence[Outcome], now: float) -> Mapping[str, object]:
    known = [each for each in past if each.prompt_tokens is not None and each.cached_tokens is not None]
    prompt, cached = sum(each.prompt_tokens or 0 for each in known), sum(each.cached_tokens or 0 for each in known)
    broke = next(((ago, each) for ago, each in enumerate(reversed(past)) if each.cause), None)
    last = known[-1] if known else None
    return {
        "id": info.id,
        "model": info.model,
        "turns": info.turns,
        "idle_seconds": max(round(now - info.last_seen, 1), 0.0),
        "expires_seconds": round(info.expires_seconds),
        "prompt_tokens": last.prompt_tokens if last is not None else None,
        "cached_tokens": last.cached_tokens if last is not None else None,
        "reuse": round(cached / prompt, 4) if prompt else None,
        "saved_tokens": cached,
        "cause": broke[1].cause if broke is not None else None,
        "cause_ago": broke[0] if broke is not None else None,
        "shortfall": past[-1].shortfall or None if past else None,
        "trimmed": any("trim_history" in each.trail for each in past),
    }
