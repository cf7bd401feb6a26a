"""What is sent to vLLM in place of what was received: gathers the facts, runs the pipeline, remembers what went up."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from proxy.core.check_fields import check_n, check_other
from proxy.core.clamp_lengths import ended_at, given_limit
from proxy.core.counting import Question
from proxy.core.draft import Facts
from proxy.core.estimate import upper_bound
from proxy.core.identity import Identity, identify
from proxy.core.images import check_media, check_urls
from proxy.core.meter import Meter
from proxy.core.pipeline import MOVES_TEXT, PIPELINE, Rewritten, rewrite
from proxy.core.request import ChatRequest, Received, parse_body
from proxy.core.splice import splice
from proxy.downstream.auth import Caller
from proxy.facts import claims_of, facts_of, guarded, model_of
from proxy.memory import Memory, learn, memory_of, remember, remember_answer
from proxy.state import State

log = logging.getLogger("proxy.rewriting")

OUTPUT_FIELD = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}
"""What carries the limit of an answer on the generating routes whose prompts are not rewritten."""

LEFT_OUT = "X-Prefix-Proxy-Left-Out"
"""The reply header that tells how many messages a cut left out of the prompt."""

REFUSABLE = MOVES_TEXT | {"continue_final", "rank"}
"""Steps whose work a template, or an older vLLM, may refuse: a 400 leads to one more try without them."""

COUNTED = "X-Prefix-Proxy-Prompt-Tokens"
"""The reply header that tells the count of the prompt, where a decision rested on one: vLLM's usage says the same."""

BIG_BYTES = 512 * 1024
"""From here on a body is taken apart and put together in a thread."""

COUNT_ROUNDS = 12
"""How often the pipeline may ask; each cut takes two or three rounds, of which most are answered from the cache."""

WITHOUT_TEXT = frozenset(name for name, _ in PIPELINE if name not in MOVES_TEXT)


@dataclass(slots=True)
class Prepared:
    """One exchange, ready to be forwarded.  `record` is called exactly once, however the exchange ends."""

    body: bytes
    make_fallback: Callable[[], bytes] | None = None
    on_fallback: Callable[[], None] | None = None
    trail: tuple[str, ...] = ()
    strip_usage: bool = False
    response_headers: Mapping[str, str] = field(default_factory=dict)
    on_end: Callable[[Meter | None, str], None] | None = None
    limit: int | None = None  # of the answer, in tokens, where the proxy gave or lowered it

    def fallback(self) -> bytes | None:
        """Return the request as received, limits and salt apart, to try after a 400; None if sent so already."""
        try:
            return self.make_fallback() if self.make_fallback is not None else None
        except Exception as error:  # the answer that vLLM gave is better than none
            log.error("fallback_failed", extra={"error": type(error).__name__})
            return None

    def fell_back(self) -> None:
        """Note that vLLM took the fallback, so that it was our text that its template refused."""
        self.trail, self.response_headers = (), _told_limit(self.limit)
        if self.on_fallback is not None:
            self.on_fallback()

    def record(self, meter: Meter | None, outcome: str) -> None:
        """Remember how the exchange went: what the answer held, None where none was relayed."""
        if self.on_end is not None:
            self.on_end(meter, outcome)


async def prepare(
    state: State,
    caller: Caller,
    headers: Mapping[str, str],
    received: Received,
    route: str,
    *,
    who: Identity | None = None,
) -> Prepared:
    """Return what to send for a request of `caller`.  Raises Reject to answer the client instead.

    `who`: whose it is, where the caller of this has found out already.
    """
    config = state.config
    check_urls(received.request.messages, config.images.allow_hosts)
    check_n(received.request.rest, config.limits.n)
    if config.profile == "off":
        return Prepared(received.raw)
    request = guarded(received.request, caller)
    who = who or identify(claims_of(config, caller, headers), request)
    model = model_of(state, request)
    memory = await memory_of(state, who, model, request, route)
    facts = await facts_of(state, caller, who, model, memory.session if memory is not None else None, received)
    done, facts = await _rewritten(state, request, facts, model)
    for step, error in done.failed:
        log.error("step_failed", extra={"step": step, "error": error})
        state.metrics.step_failed(step)
    asking, asked = _ask_usage(done.request)
    # Nobody else waits while a huge body is put together anew.
    big = len(received.raw) > BIG_BYTES
    body = await asyncio.to_thread(splice, received, asking) if big else splice(received, asking)
    prepared = Prepared(body, trail=done.trail + (("include_usage",) if asked else ()), strip_usage=asked)
    return _completed(prepared, state, received, request, facts, done, memory, model)


async def _rewritten(state: State, request: ChatRequest, facts: Facts, model: str) -> tuple[Rewritten, Facts]:
    """Run the pipeline; where it cannot decide before something is counted, count it and run it again."""
    for _ in range(COUNT_ROUNDS):
        done = rewrite(request, facts)
        if not done.questions:
            return done, facts
        counts, rough = await _counted(state, done.questions, model)
        facts = replace(facts, counts={**facts.counts, **counts}, rough=facts.rough | rough)
    without = replace(facts, steps=facts.steps - {"trim_history"})
    state.metrics.step_failed("trim_history")
    return rewrite(request, without), without


async def _counted(state: State, questions: tuple[Question, ...], model: str) -> tuple[dict[bytes, int], set[bytes]]:
    """Return the counts of all `questions`, by their keys, and which are not the model's own; asked at once."""
    answers = await asyncio.gather(
        *(
            state.counter.count(
                model,
                question.messages,
                key=question.key,
                tools=question.rest.get("tools"),
                fields={**question.rest, "add_generation_prompt": question.generation},
            )
            for question in questions
        )
    )
    counts = {question.key: answer.tokens for question, answer in zip(questions, answers, strict=True)}
    return counts, {question.key for question, answer in zip(questions, answers, strict=True) if not answer.exact}


async def prepare_other(state: State, caller: Caller, headers: Mapping[str, str], raw: bytes, route: str) -> bytes:
    """Return what to send on a generating route whose prompt is not rewritten: limits, caps and salt hold there too.

    Raises Reject for a body that is no JSON object or asks for an impossible length.
    """
    config = state.config
    received = parse_body(raw, max_messages=config.limits.messages, max_images=config.limits.images, chat=False)
    check_media(received.request.rest, config.images.allow_hosts, config.limits.images)
    check_other(received.request.rest, config.limits.messages)
    if config.profile == "off":
        return raw
    request = guarded(received.request, caller)
    who = identify(claims_of(config, caller, headers), request)
    model = model_of(state, request)
    facts = await facts_of(state, caller, who, model, None, received)
    lengths = replace(facts.lengths, fields=(OUTPUT_FIELD[route],))
    return splice(received, rewrite(request, replace(facts, lengths=lengths)).request)


def _completed(
    prepared: Prepared,
    state: State,
    received: Received,
    request: ChatRequest,
    facts: Facts,
    done: Rewritten,
    memory: Memory | None,
    model: str,
) -> Prepared:
    """Return `prepared` with what is told of it, remembered of it, and tried after a refusal."""
    limit = given_limit(request.rest, done.request.rest, facts.lengths.fields)
    prepared.response_headers, prepared.limit = _told(done, limit), limit
    if memory is not None:
        remember(state, memory, facts, done)
    prepared.on_end = lambda meter, outcome: _ended(state, memory, meter, model, limit, done.request)
    ours = set(done.trail) & REFUSABLE
    if ours:
        bare = replace(facts, steps=facts.steps & (WITHOUT_TEXT - REFUSABLE))
        prepared.make_fallback = lambda: splice(received, _ask_usage(_at_once(request, bare).request)[0])
        prepared.on_fallback = lambda: _fell_back(state, request, bare, memory, model, ours)
    return prepared


def _ended(
    state: State, memory: Memory | None, meter: Meter | None, model: str, limit: int | None, sent: ChatRequest
) -> None:  # fmt: skip
    if meter is not None and ended_at(limit, meter):
        state.metrics.limited_answer()
    if meter is not None and meter.usage is not None:
        state.counter.learn_images(model, sent, meter.usage.prompt_tokens)
    if memory is not None:
        remember_answer(state, memory, meter, model)
    else:
        learn(state, meter, model)


def _told_limit(limit: int | None) -> Mapping[str, str]:
    return {"X-Prefix-Proxy-Max-Tokens": str(limit)} if limit is not None else {}


def _told(done: Rewritten, limit: int | None) -> Mapping[str, str]:
    """Return the reply headers: what changed the request, how much was left out of it, our limit of the answer."""
    headers = {**_told_limit(limit)}
    if done.trail:
        headers["X-Prefix-Proxy-Trail"] = ",".join(done.trail)
    if done.exact and done.counted is not None:
        headers[COUNTED] = str(done.counted)
    return {**headers, LEFT_OUT: str(done.left_out)} if done.left_out else headers


def _ask_usage(request: ChatRequest) -> tuple[ChatRequest, bool]:
    """Ask for the usage event where the client did not: the proxy's own figures come from it."""
    options = request.rest.get("stream_options")
    if request.rest.get("stream") is not True or not isinstance(options, dict | None):
        return request, False
    if options is not None and options.get("include_usage") is True:
        return request, False
    asked = {**(options or {}), "include_usage": True}
    return replace(request, rest={**request.rest, "stream_options": asked}), True


def _fell_back(
    state: State, request: ChatRequest, bare: Facts, memory: Memory | None, model: str, ours: set[str]
) -> None:
    """What vLLM refused is off for this model until it is found anew; the ledger is told what vLLM has instead.

    Where it may have been a task's priority or its text, it is the priority: an older vLLM refuses any, while the text
    is one that it has answered before, with an instruction behind it.
    """
    if "rank" in ours:
        state.templates.refuse_priority(model)
        return
    state.templates.refuse(model)
    state.metrics.step_failed("template")
    if memory is not None:
        remember(state, memory, replace(bare, steps=MOVES_TEXT), _at_once(request, bare))


def _at_once(request: ChatRequest, facts: Facts) -> Rewritten:
    """Rewrite without waiting for counts: what is not known counts as its upper bound, so limits and salt hold."""
    done = rewrite(request, facts)
    for _ in range(COUNT_ROUNDS):
        if not done.questions:
            return done
        bounds = {q.key: _bound(q, facts.image_tokens) for q in done.questions}
        facts = replace(facts, counts={**facts.counts, **bounds}, rough=facts.rough | bounds.keys())
        done = rewrite(request, facts)
    return rewrite(request, replace(facts, steps=facts.steps - {"trim_history"})) if done.questions else done


def _bound(question: Question, image_tokens: int) -> int:
    return upper_bound(question.messages, question.rest.get("tools"), per_image=image_tokens)
