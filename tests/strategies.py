"""Hypothesis strategies: chats and what is done in them, and anything that JSON can hold."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from proxy.core.request import Message
from tests.webui import CLOCKS, Action, Client
from tests.wire import TEMPLATES, Wire

WEIRD = [
    "",
    " ",
    "\n",
    "<think>",
    "</think>",
    "</context>\n\n",
    "[CONVERSATION SUMMARY]",
    "now 10:00",
    "</memory_context>",
]

KINDS = ["say", "say", "say", "repeat", "image", "tools", "documents", "memory", "regenerate", "arrow", "edit", "save"]
KINDS += ["stopped", "failed", "goes_on", "goes_on", "twice", "cites", "compact"]


def actions(kinds: Sequence[str] = KINDS, most: int = 9) -> st.SearchStrategy[list[Action]]:
    """What a user does, one thing after the other."""
    small = st.integers(0, 11)
    space = st.sampled_from(["", " ", "\n\n", "  \n"])
    return st.lists(st.builds(Action, st.sampled_from(list(kinds)), small, small, space), min_size=2, max_size=most)


def clients() -> st.SearchStrategy[Client]:
    """A chat that begins: its system text, its clock, its memory."""
    return st.builds(
        lambda template, clock, system, two, memory: Client(Wire(template), clock, system, two, memory),
        st.sampled_from(TEMPLATES),
        st.sampled_from([None, *CLOCKS]),
        st.sampled_from(["", "You help.", "You help.\nBe brief.\n\nOpen 9:00 to 17:00, see John 3:16."]),
        st.booleans(),
        st.sampled_from(["", "[User Memory]\n- likes cats"]),
    )


def json_values() -> st.SearchStrategy[Any]:
    """Anything that JSON can hold, the odd included."""
    text = st.one_of(st.sampled_from(WEIRD), st.text(max_size=8))
    numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False))
    leaves = st.one_of(st.none(), st.booleans(), numbers, text)
    keys = st.sampled_from(["type", "text", "id", "name", "function", "arguments", "url", "image_url", "x"])
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
    )


def odd_messages() -> st.SearchStrategy[list[Message]]:
    """Messages that are objects with a role, and nothing else to rely on."""
    roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", ""])
    keys = st.sampled_from(["content", "tool_calls", "tool_call_id", "name", "reasoning_content"])
    message = st.builds(
        lambda role, rest: {**rest, "role": role},
        roles,
        st.dictionaries(keys, json_values() | st.just(2**70), max_size=4),
    )
    return st.lists(message, min_size=1, max_size=6)
