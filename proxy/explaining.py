"""Why an exchange reused what it did: a prediction when it goes up, the real figure when vLLM's usage comes back."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.last_prompt import LastPrompt, Prompt, answered, prompt_of
from proxy.core.masked import around
from proxy.core.meter import Meter
from proxy.core.past import Outcome
from proxy.core.prefix import ASSUMED_BLOCK_TOKENS, Prediction, judge, nearest, predict
from proxy.core.request import ChatRequest, Message
from proxy.core.text import text_of
from proxy.sessions import Session
from proxy.state import State

log = logging.getLogger("proxy.explaining")


@dataclass(frozen=True, slots=True)
class Expected:
    """A prompt that went up, the one that it was compared with, and what should come of it."""

    prompt: Prompt
    last: LastPrompt | None
    prediction: Prediction
    texts: Sequence[Message] | None
    trail: tuple[str, ...]
    at: float  # wall seconds


def expect(
    state: State, session: Session, request: ChatRequest, trail: tuple[str, ...], tools: bytes
) -> Expected | None:
    """Return what a request that goes up now should reuse, None if that cannot be told.

    `tools` is the digest of its tools list.  Tasks never come here: a chat is compared with its own last prompt.
    """
    try:
        return _expected(state, session, request, trail, tools)
    except Exception as error:  # an explanation costs nobody an answer
        log.error("explaining_failed", extra={"error": type(error).__name__})
        state.metrics.step_failed("record")
        return None


def _expected(
    state: State, session: Session, request: ChatRequest, trail: tuple[str, ...], tools: bytes
) -> Expected:  # fmt: skip
    prompt = prompt_of(request.messages, request.rest, model=session.key.model, tools=tools)
    last = nearest(session.past.prompts, prompt)
    texts = state.last_texts.get(last)
    block = state.models.block_size or ASSUMED_BLOCK_TOKENS
    found = predict(last, prompt, block, texts=texts, trimming="trim_history" in trail)
    if last is None and found.cause and state.sessions.has_other_model(session.key):
        found = Prediction(block, cause="model")
    return Expected(prompt, last, found, texts, trail, time.time())


def settle(state: State, session: Session, expected: Expected, meter: Meter | None, reply: Message | None) -> None:
    """Compare a prediction with what vLLM's usage says, count both, and keep the prompt for the next one.

    To be called within the session's `touch`.  A prompt that vLLM never began is not kept.
    """
    usage = meter.usage if meter is not None else None
    cached = usage.cached_tokens if usage is not None else None
    found, past = expected.prediction, session.past
    shortfall = ""
    if expected.last is not None and usage is not None and cached is not None:
        shortfall = judge(found, cached, prompt_tokens=usage.prompt_tokens, repeated=past.lost_reply)
        state.metrics.predicted(found.tokens, cached)
        past.lost_reply = shortfall in ("template", "retokenised")
    state.metrics.prefix_judged(found.cause, shortfall)
    past.add_outcome(_outcome(state, expected, meter, cached, shortfall))
    if meter is not None and (usage is not None or meter.first_token is not None) and not meter.error:
        _keep(state, session, expected, meter, reply)


def _keep(state: State, session: Session, expected: Expected, meter: Meter, reply: Message | None) -> None:
    usage, told, last = meter.usage, meter.reply(), expected.last
    prompt = answered(
        expected.prompt,
        last,
        expected.prediction.messages,
        tokens=(usage.prompt_tokens, usage.completion_tokens) if usage is not None else None,
        reply=reply,
        cut=told is None or not told.complete,
    )
    goes_on = last is not None and expected.prediction.messages >= len(last.prints)
    session.past.add_prompt(prompt, last if goes_on else None)
    state.last_texts.drop(last if goes_on else None)
    closed = expected.prompt.messages[: len(prompt.prints)]
    state.last_texts.keep(prompt, closed if reply is None else (*closed, reply))


_PLACE = ("message", "role", "character", "exact", "before", "now")


def described(outcome: Outcome) -> dict[str, object]:
    """Return an exchange as the internal route shows it: figures, causes, places, and no text.

    `predicted_tokens` above `sure_tokens` are an estimate.  `before` and `now` are masked: x a letter, 0 a digit.
    """
    return {
        "at": round(outcome.at, 3),
        "messages": outcome.messages,
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "cached_tokens": outcome.cached_tokens,
        "predicted_messages": outcome.predicted_messages,
        "predicted_tokens": outcome.predicted_tokens,
        "sure_tokens": outcome.sure_tokens,
        "block_tokens": outcome.block_tokens,
        "block_tokens_assumed": outcome.block_assumed,
        "cause": outcome.cause or None,
        "shortfall": outcome.shortfall or None,
        "trail": list(outcome.trail),
        "break": None if outcome.place is None else dict(zip(_PLACE, outcome.place, strict=True)),
    }


def _outcome(state: State, expected: Expected, meter: Meter | None, cached: int | None, shortfall: str) -> Outcome:
    found, compared = expected.prediction, expected.last is not None
    usage = meter.usage if meter is not None else None
    return Outcome(
        at=expected.at,
        messages=len(expected.prompt.messages),
        prompt_tokens=usage.prompt_tokens if usage is not None else None,
        completion_tokens=usage.completion_tokens if usage is not None else None,
        cached_tokens=cached,
        predicted_messages=found.messages if compared else None,
        predicted_tokens=found.tokens if compared else None,
        sure_tokens=found.sure_tokens if compared else None,
        block_tokens=found.block_tokens,
        block_assumed=state.models.block_size is None,
        cause=found.cause,
        shortfall=shortfall,
        trail=expected.trail,
        place=_place(expected, found.message, found.character) if found.message is not None else None,
    )


def _place(expected: Expected, message: int, character: int | None) -> tuple[object, ...]:
    texts, told = expected.texts, expected.prompt.messages[message]
    before = now = None
    if character is not None:
        now = around(text_of(told), character)
        before = around(text_of(texts[message]), character) if texts is not None and message < len(texts) else None
    return message, _known_role(told), character, expected.prediction.located, before, now


def _known_role(message: Message) -> str:
    """A role is a word of the client's: only those of the protocol are shown."""
    role = str(message.get("role"))
    return role if role in ("system", "developer", "user", "assistant", "tool") else "other"
