"""Texts that are kept for a short while: how long, how many, and that nothing else keeps them."""

import asyncio

from proxy.core.last_prompt import LastPrompt, answered, prompt_of
from proxy.last_texts import LastTexts
from tests.bodies import eventually

HI = {"role": "user", "content": "hi"}


def prompt() -> LastPrompt:
    """Return a prompt that was answered."""
    return answered(prompt_of((HI,), {}, model="m"), None, 0, tokens=None, reply=None)


async def test_a_text_goes_when_its_time_is_over_also_where_nobody_asks() -> None:
    texts, kept = LastTexts(seconds=0.05), prompt()
    texts.keep(kept, [HI])
    assert texts.get(kept) == (HI,)
    await eventually(lambda: not len(texts))
    assert texts.get(kept) is None and texts.get(None) is None


async def test_a_text_is_not_given_out_a_moment_too_late() -> None:
    """Also before the timer came to it."""
    now = 0.0
    texts, kept = LastTexts(seconds=120, clock=lambda: now), prompt()
    texts.keep(kept, [HI])
    now = 120.0
    assert texts.get(kept) is None


async def test_the_oldest_texts_go_when_there_are_too_many() -> None:
    texts, kept = LastTexts(most_bytes=2000), [prompt() for _ in range(9)]
    for each in kept:
        texts.keep(each, [HI])
    assert len(texts) == 4 and texts.get(kept[0]) is None and texts.get(kept[-1]) == (HI,)
    texts.keep(kept[-1], [{"role": "user", "content": "x" * 1000}])
    assert len(texts) == 0
    texts.clear()


async def test_a_later_text_has_its_own_time() -> None:
    texts, first, second = LastTexts(seconds=0.1), prompt(), prompt()
    texts.keep(first, [HI])
    await asyncio.sleep(0.06)
    texts.keep(second, [HI])
    await eventually(lambda: len(texts) == 1)
    assert texts.get(second) == (HI,)
    await eventually(lambda: not len(texts))
