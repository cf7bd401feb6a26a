"""Requests that many tests send, what they look for in a stream of events, and how they wait."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

OK = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"ok"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """Return a chat request of one user message, with these further fields."""
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


def stream(text: str = "hi", *, usage: bool = True, **fields: Any) -> dict[str, Any]:
    """Return a streamed chat request; with `usage` the client asks for the usage event itself."""
    options = {"stream_options": {"include_usage": True}} if usage else {}
    return chat(text, stream=True, **options, **fields)


def data_of(body: bytes) -> list[Any]:
    """Return the data of each event in `body`: parsed, or the text "[DONE]".  Raises ValueError if one is no JSON."""
    lines = [line[5:].strip() for line in body.decode().split("\n") if line.startswith("data:")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def eventually(holds: Callable[[], object], within_seconds: float = 2.0) -> None:
    """Wait until `holds()` is true; raise TimeoutError if it is not in time."""
    async with asyncio.timeout(within_seconds):
        while not holds():  # noqa: ASYNC110  what is waited for is any number of any component, not an event
            await asyncio.sleep(0.002)
