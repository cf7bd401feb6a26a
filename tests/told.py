"""Chats and tasks as Open WebUI sends them for one known user, and what of them went up."""

from typing import Any

from tests.conftest import RunningProxy
from tests.fake_vllm import FakeVllm
from tests.flights import answer, runs, who

TITLE, TAGS, FOLLOW_UPS, QUERY = "title_generation", "tags_generation", "follow_up_generation", "query_generation"


def system(text: str) -> dict[str, Any]:
    """Return a system message."""
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    """Return a user message."""
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, Any]:
    """Return a reply as it is told."""
    return {"role": "assistant", "content": text}


async def sent(
    proxy: RunningProxy, fake: FakeVllm, messages: list[Any], *, of: dict[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    """Send a request of a user whom the headers `of` name (user u1 in chat c, unless given); return what went up."""
    body = {"model": "fake", "messages": messages, **fields}
    status, raw = await answer(proxy, body, **(who(chat="c") if of is None else of))
    assert status == 200, raw
    return runs(fake)[-1].body
