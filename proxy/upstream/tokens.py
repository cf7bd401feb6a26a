"""How many tokens a prompt of the served model has: asked of vLLM, else counted here, else a sure upper bound."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from proxy.aio import Tasks
from proxy.config.traffic import Tokens as Settings
from proxy.core.estimate import characters, media_count, upper_bound, without_media
from proxy.core.request import ChatRequest, Message
from proxy.metrics import Metrics
from proxy.upstream.local_tokens import LocalTokens
from proxy.upstream.vllm import TOKENIZE_BYTES, Models, Vllm

How = Literal["vllm", "local", "estimate"]

CACHED = 65_536  # counts kept, each under 300 bytes
# vLLM tokenises in one thread for everyone: more of ours at once would only hold up the others.
AT_ONCE = 4
FAILURES = 3  # in a row, until /tokenize is left alone
REST_SECONDS = 10.0
PATIENCE = 5  # times tokens.wait_seconds, that many questions at once may take together
# From here on JSON is written, and bytes are counted, in a thread.
BIG_CHARACTERS = 64 * 1024
MOST_PER_IMAGE = 32_768  # tokens
SAMPLES = 32  # prompts that show, for each model, what an image counts

TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "mm_processor_kwargs")
"""Fields of a request that change what the template renders and that /tokenize takes."""


@dataclass(frozen=True, slots=True)
class Count:
    """Tokens of a prompt and how they were found: `estimate` is an upper bound; images are always estimated."""

    tokens: int
    how: How
    images: int = 0

    @property
    def exact(self) -> bool:
        """Whether vLLM will count the same."""
        return self.how == "vllm" and not self.images


class Breaker:
    """Leaves /tokenize alone for a while when it keeps failing.  Times are monotonic seconds."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def open(self, now: float) -> bool:
        """Say whether vLLM is not to be asked now."""
        return now < self._until

    def note(self, now: float, *, failed: bool) -> None:
        """Note how an attempt ended; once failed too often, a single failure after the rest is enough."""
        self._failures = self._failures + 1 if failed else 0
        if self._failures >= FAILURES:
            self._until = now + REST_SECONDS


class TokenCounter:
    """Counts of prompts, kept by the caller's digest; equal ones asked for at once are counted once."""

    def __init__(self, settings: Settings, vllm: Vllm, models: Models, tasks: Tasks, metrics: Metrics) -> None:
        self._settings, self._vllm, self._models, self._tasks, self._metrics = settings, vllm, models, tasks, metrics
        self._local = LocalTokens(settings.local_file)
        self._known: dict[tuple[str, bytes], Count] = {}  # in the order of use
        self._asking: dict[tuple[str, bytes], asyncio.Task[object]] = {}
        self._roots: dict[str, object] = {}  # what each model was when its counts were made
        self._per_image: dict[str, int] = {}  # learned, in tokens
        self._samples: dict[str, int] = {}  # prompts that it was learned from, by model
        self._places = asyncio.Semaphore(AT_ONCE)
        self._breaker = Breaker()

    async def count(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        key: bytes,
        tools: object = None,
        fields: Mapping[str, object] | None = None,
    ) -> Count:
        """Return the tokens of the prompt that `messages` make: template, tools and generation prompt included.

        `fields` may be all the other fields of the request: those of `TEMPLATE_FIELDS` count.  `key` (16 bytes) must
        differ wherever messages, tools or those fields differ.  Never raises, and takes at most five times
        `tokens.wait_seconds`; the generation prompt is counted unless `fields` say otherwise, as vLLM does.
        """
        at = (model, key)
        known = self.known(model, key)
        if known is not None:
            self._metrics.counted("cached")
            return known
        task = self._asking.get(at)
        if task is None:
            work = self._work(at, messages, tools, fields or {})
            task = self._asking[at] = self._tasks.spawn(work, name="token-count")
        # The run goes on when this caller leaves or has waited long enough: others wait too, and the next may ask.
        await asyncio.wait((task,), timeout=PATIENCE * self._settings.wait_seconds)
        if task.done() and not task.cancelled() and task.exception() is None:
            found = task.result()
            assert isinstance(found, Count)
            return found
        return await self._estimate(model, messages, tools)

    def known(self, model: str, key: bytes) -> Count | None:
        """Return a count that is at hand, without asking anyone."""
        root = self._models.identity(model)
        if model in self._roots and self._roots[model] != root:
            # Another model under the same name: it may have another tokenizer and another template.
            self._known.clear()
            self._per_image.clear()
            self._samples.clear()
            self._roots.clear()
        found = self._known.pop((model, key), None)
        if found is not None:
            self._known[model, key] = found
        return found

    def per_image(self, model: str) -> int:
        """Return what an image counts, in tokens: learned from vLLM's usage, else the setting."""
        return self._per_image.get(model, self._settings.per_image)

    def learn_image(self, model: str, *, images: int, text_tokens: int, prompt_tokens: int) -> None:
        """Note what vLLM's usage says of a prompt with `images` whose text alone is known to have `text_tokens`.

        The largest is kept: images differ, and a count must not be too low.
        """
        each = -(-(prompt_tokens - text_tokens) // images) if images > 0 else 0
        if 0 < each <= MOST_PER_IMAGE and model in self._models.known():
            self._per_image[model] = max(each, self._per_image.get(model, 0))

    def learn_images(self, model: str, request: ChatRequest, prompt_tokens: int) -> None:
        """Learn from vLLM's usage of a prompt with images; what its text alone has is asked in the background."""
        images = media_count(request.messages)
        if images and self._samples.get(model, 0) < SAMPLES and model in self._models.known():
            self._samples[model] = self._samples.get(model, 0) + 1
            self._tasks.spawn(self._learn(model, request, images, prompt_tokens), name="image-tokens")

    async def _learn(self, model: str, request: ChatRequest, images: int, prompt_tokens: int) -> None:
        text, rest = without_media(request.messages), request.rest
        tokens, _ = await self._asked(model, text, rest.get("tools"), rest)
        if tokens is not None:
            self.learn_image(model, images=images, text_tokens=tokens, prompt_tokens=prompt_tokens)

    async def _work(
        self, at: tuple[str, bytes], messages: Sequence[Message], tools: object, fields: Mapping[str, object]
    ) -> Count:
        model, begun = at[0], time.monotonic()
        try:
            images = media_count(messages)
            tokens, final = await self._asked(model, without_media(messages) if images else messages, tools, fields)
            if tokens is not None:
                count = Count(tokens + images * self.per_image(model), "vllm", images)
            else:
                local = await self._local.count(messages, tools, per_image=self.per_image(model))
                if local is None:
                    count = await self._estimate(model, messages, tools)
                else:
                    count = Count(local, "local", images)
            self._metrics.counted(count.how, time.monotonic() - begun)
            if final:
                self._keep(at, count)
            return count
        finally:
            self._asking.pop(at, None)

    def _keep(self, at: tuple[str, bytes], count: Count) -> None:
        if at[0] in self._models.known():
            self._roots[at[0]] = self._models.identity(at[0])
            self._known[at] = count
            if len(self._known) > CACHED:
                del self._known[next(iter(self._known))]

    async def _asked(
        self, model: str, messages: Sequence[Message], tools: object, fields: Mapping[str, object]
    ) -> tuple[int | None, bool]:
        """Return what vLLM says, None if nothing, and whether it would say so again."""
        if model not in self._models.known() or self._breaker.open(time.monotonic()):
            return None, False
        size = characters(messages)
        if size > TOKENIZE_BYTES:
            return None, True
        body = {"model": model, "messages": messages, **_template_fields(fields)}
        if tools:
            body["tools"] = tools
        raw = await asyncio.to_thread(_json, body) if size > BIG_CHARACTERS else _json(body)
        if raw is None or len(raw) > TOKENIZE_BYTES:
            return None, True
        async with self._places:
            if self._breaker.open(time.monotonic()):  # since this began to wait for a place
                return None, False
            status, tokens = await self._vllm.count(raw, seconds=self._settings.wait_seconds)
        # 400: the template refuses these messages, as it will the request; vLLM is well.
        self._breaker.note(time.monotonic(), failed=tokens is None and status != 400)
        return tokens, tokens is not None or status == 400

    async def _estimate(self, model: str, messages: Sequence[Message], tools: object) -> Count:
        per_image, images = self.per_image(model), media_count(messages)
        if characters(messages) <= BIG_CHARACTERS:
            return Count(upper_bound(messages, tools, per_image=per_image), "estimate", images)
        bound = await asyncio.to_thread(upper_bound, messages, tools, per_image=per_image)
        return Count(bound, "estimate", images)


def _template_fields(fields: Mapping[str, object]) -> dict[str, object]:
    told = {name: fields[name] for name in TEMPLATE_FIELDS if fields.get(name) is not None}
    # The chat route hands it to the template, which /tokenize does only under this name.
    effort, given = fields.get("reasoning_effort"), told.get("chat_template_kwargs")
    if effort is not None and isinstance(given, dict | None):
        told["chat_template_kwargs"] = {"reasoning_effort": effort, **(given or {})}
    return told


def _json(body: Mapping[str, object]) -> bytes | None:
    try:
        return orjson.dumps(body)
    except TypeError:  # a lone surrogate, or an integer beyond 64 bits
        return None
