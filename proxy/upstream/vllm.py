"""What the proxy itself asks of vLLM: its models, whether it is well, its block size, how many tokens a text has."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import orjson

from proxy.aio import Tasks

# A poll that takes longer counts as failed: users wait for the model list before they see a page.
POLL_SECONDS = 2.0
# How soon after a poll another one may be asked for out of turn, when there is a sign that vLLM came or went.
POKE_SECONDS = 1.0
HEALTH_SECONDS = 1.0
USAGE_SECONDS = 5.0
CROWDED_SHARE = 0.8
TOKENIZE_SECONDS = 10.0
# vLLM tokenises on the event loop that serves everyone: 6 MB were seen to hold it up for nine seconds.
TOKENIZE_BYTES = 1024 * 1024
_ANSWER_BYTES = 32 * 1024 * 1024
_KV_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(?:\{[^}\n]{0,8000}\})? ([0-9.e+-]{1,24})$", re.MULTILINE)
_BLOCK_SIZE = re.compile(rb'^vllm:cache_config_info\{(?:[^}\n]{0,8000},)?block_size="(\d{1,6})"', re.MULTILINE)
_STARTED = re.compile(rb"^process_start_time_seconds ([0-9.e+]{1,24})", re.MULTILINE)
_COUNT = re.compile(rb'\{\s*"count"\s*:\s*(\d{1,12})\s*[,}]')


class Fetch(Protocol):
    """One small exchange with vLLM, read whole.  Returns (status, content type, body), None if vLLM did not answer."""

    async def __call__(
        self, method: str, path: str, *, body: bytes | None = None, seconds: float, limit_bytes: int
    ) -> tuple[int, str, bytes] | None: ...


@dataclass(frozen=True, slots=True)
class ModelList:
    """The last answer of vLLM to GET /v1/models, and what it says."""

    body: bytes  # as it came
    models: Mapping[str, Mapping[str, object]]  # by id
    max_model_len: Mapping[str, int]  # in tokens, where told


def parse_models(body: bytes) -> ModelList | None:
    """Read a model list; None if it is not one (an HTML page of something between, an error)."""
    try:
        data = orjson.loads(body)["data"]
        models = {entry["id"]: entry for entry in data if isinstance(entry["id"], str)}
    except (ValueError, TypeError, KeyError):
        return None
    lengths = {name: entry.get("max_model_len") for name, entry in models.items()}
    return ModelList(body, models, {name: size for name, size in lengths.items() if isinstance(size, int)})


def parse_block_size(metrics: bytes) -> int | None:
    """Return the tokens in a block of vLLM's prefix cache from its /metrics, None if it does not say."""
    found = _BLOCK_SIZE.search(metrics)
    return int(found[1]) if found else None


def parse_kv_usage(metrics: bytes) -> float | None:
    """Return the share of vLLM's KV cache that live requests hold (0 to 1), the fullest engine's; None if not told."""
    found = [float(value) for value in _KV_USAGE.findall(metrics)]
    return max(found, default=None)


class Models:
    """vLLM's model list: asked for in the background, kept while vLLM is away."""

    def __init__(self, fetch: Fetch, tasks: Tasks, *, refresh_seconds: float) -> None:
        self._fetch = fetch
        self._tasks = tasks
        self._refresh_seconds = refresh_seconds
        self._list: ModelList | None = None
        self._poll: asyncio.Task[object] | None = None
        self._polled_at = -1e9  # when the last poll began, in monotonic seconds
        self._listed_at = -1e9
        self._failed = False
        self.block_size: int | None = None  # tokens
        self.generation = 0  # how often vLLM was found anew: what was learned about it earlier may be wrong now
        self.on_restart: Callable[[], None] = lambda: None  # called when another process is found than before
        self._started: bytes | None = None  # when vLLM's process began, as it tells it

    async def run(self) -> None:
        """Ask once per interval, for ever."""
        while True:
            self.refresh()
            await asyncio.sleep(max(0.01, self._polled_at + self._refresh_seconds - time.monotonic()))

    def refresh(self, *, least_seconds: float | None = None) -> None:
        """Begin a poll unless one runs or the last one began less than an interval (or `least_seconds`) ago."""
        wait = self._refresh_seconds if least_seconds is None else min(least_seconds, self._refresh_seconds)
        # The loop's timer may fire a little early.
        if (self._poll is None or self._poll.done()) and time.monotonic() - self._polled_at >= wait - 0.005:
            self._polled_at = time.monotonic()
            self._poll = self._tasks.spawn(self._ask(), name="models-poll")

    def poke(self) -> None:
        """Ask soon: something suggests that vLLM came back or went (a failed exchange, a readiness check)."""
        self.refresh(least_seconds=POKE_SECONDS)

    async def _ask(self) -> None:
        answer = await self._fetch("GET", "/v1/models", seconds=POLL_SECONDS, limit_bytes=_ANSWER_BYTES)
        found = parse_models(answer[2]) if answer is not None and answer[0] == 200 else None
        if found is None:
            self._failed = True
            return
        anew = self._failed or self._list is None
        self._list, self._failed, self._listed_at = found, False, time.monotonic()
        if anew:
            self.generation += 1
            await self._ask_block_size()

    async def _ask_block_size(self) -> None:
        answer = await self._fetch("GET", "/metrics", seconds=POLL_SECONDS, limit_bytes=_ANSWER_BYTES)
        told = answer[2] if answer is not None and answer[0] == 200 else b""
        self.block_size = parse_block_size(told)
        started = _STARTED.search(told)
        if started is None:
            return
        if self._started is not None and started[1] != self._started:
            self.on_restart()
        self._started = started[1]

    async def get(self, *, wait_seconds: float) -> ModelList | None:
        """Return the last list at once; without one wait for the poll that runs, at most `wait_seconds`."""
        if self._list is None and self._poll is not None:
            await asyncio.wait((self._poll,), timeout=wait_seconds)
        return self._list

    @property
    def stale(self) -> bool:
        """Whether vLLM did not confirm the list when it was last due."""
        return self._failed or time.monotonic() - self._listed_at > self._refresh_seconds + POLL_SECONDS

    def known(self) -> frozenset[str]:
        """Return the ids in the last list."""
        return frozenset(self._list.models) if self._list else frozenset()

    def names(self) -> tuple[str, ...]:
        """Return the ids in the order of the last list: vLLM serves the first where a request names none."""
        return tuple(self._list.models) if self._list else ()

    def max_model_len(self, model: str) -> int | None:
        """Return how many tokens prompt and answer of `model` may have together, None if unknown."""
        return self._list.max_model_len.get(model) if self._list else None

    def identity(self, model: str) -> object:
        """Return what tells a model from another that was served under the same name; None if it is not known."""
        told = self._list.models.get(model) if self._list else None
        return None if told is None else (told.get("root"), told.get("parent"), told.get("max_model_len"))


class Vllm:
    """The other questions to vLLM."""

    def __init__(self, fetch: Fetch, tasks: Tasks) -> None:
        self._fetch = fetch
        self._tasks = tasks
        self._check: asyncio.Task[object] | None = None
        self._checked_at = -1e9
        self._well = False
        self._usage: float | None = None
        self._used_at = -1e9

    async def healthy(self) -> bool:
        """Return whether vLLM says that it is well; asked at most once a second, however many want to know."""
        if self._check is None and time.monotonic() - self._checked_at < HEALTH_SECONDS:
            return self._well
        if self._check is None:
            self._check = self._tasks.spawn(self._ask_health(), name="health-check")
        await asyncio.wait((self._check,))
        return self._well

    @property
    def crowded(self) -> bool:
        """Whether live requests fill so much of the KV cache that what was cached may be gone; asks for the next time.

        vLLM's gauge lags by an engine step, so that a figure of some seconds ago is as good.
        """
        if time.monotonic() - self._used_at > USAGE_SECONDS:
            self._used_at = time.monotonic()
            self._tasks.spawn(self._ask_usage(), name="kv-usage")
        return self._usage is not None and self._usage >= CROWDED_SHARE

    async def _ask_usage(self) -> None:
        answer = await self._fetch("GET", "/metrics", seconds=POLL_SECONDS, limit_bytes=_ANSWER_BYTES)
        self._usage = parse_kv_usage(answer[2]) if answer is not None and answer[0] == 200 else None

    async def _ask_health(self) -> None:
        try:
            answer = await self._fetch("GET", "/health", seconds=POLL_SECONDS, limit_bytes=_ANSWER_BYTES)
            self._well = answer is not None and answer[0] == 200
        finally:
            self._check, self._checked_at = None, time.monotonic()

    async def count(self, raw: bytes, *, seconds: float) -> tuple[int, int | None]:
        """Return the status of /tokenize for the body `raw` (0: no answer in `seconds`) and how many tokens it made."""
        answer = await self._fetch("POST", "/tokenize", body=raw, seconds=seconds, limit_bytes=_ANSWER_BYTES)
        if answer is None:
            return 0, None
        if answer[0] != 200:
            return answer[0], None
        # The ids of all tokens come after it: a number for each, which nobody here wants parsed.
        if (found := _COUNT.match(answer[2])) is not None:
            return 200, int(found[1])
        count = _object(answer[2]).get("count")
        return 200, count if isinstance(count, int) else None

    async def tokenize(self, body: Mapping[str, object]) -> int | None:
        """Return how many tokens `body` (as for /tokenize) makes; None if it is too large or vLLM will not say."""
        count = (await self._tokenized(body)).get("count")
        return count if isinstance(count, int) else None

    async def tokens(self, body: Mapping[str, object]) -> list[int] | None:
        """Return the ids of the tokens that `body` (as for /tokenize) makes; None as for `tokenize`."""
        found = (await self._tokenized(body)).get("tokens")
        return found if isinstance(found, list) and found else None

    async def _tokenized(self, body: Mapping[str, object]) -> Mapping[str, object]:
        raw = orjson.dumps(body)
        if len(raw) > TOKENIZE_BYTES:
            return {}
        answer = await self._fetch(
            "POST", "/tokenize", body=raw, seconds=TOKENIZE_SECONDS, limit_bytes=_ANSWER_BYTES
        )  # fmt: skip
        return _object(answer[2]) if answer is not None and answer[0] == 200 else {}


def _object(raw: bytes) -> Mapping[str, object]:
    try:
        found = orjson.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
