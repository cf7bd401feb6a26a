"""The order of tools: the session's, or by name; nothing inside a tool moves (cases PC-06, PC-07)."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.draft import Draft, Facts
from proxy.core.keep_tools import keep_tools, tool_digests
from proxy.core.ledger import Ledger
from tests.strategies import json_values

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}


def tool(name: str, description: str = "x") -> dict[str, Any]:
    """Return a tool whose schema is in no alphabetical order."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": SCHEMA}}


def kept(tools: Any, before: Any = (), order: str = "session", **rest: Any) -> dict[str, Any]:
    """Return the fields that go up."""
    digests = tool_digests({"tools": before})
    facts = Facts(frozenset(), Ledger(0), tools=digests, tools_order=order)
    return dict(keep_tools(Draft((), (), {"tools": tools, **rest}), facts).rest)


def names(tools: Any) -> list[str]:
    """Return the names of tools in their order."""
    return [t["function"]["name"] for t in tools]


def test_pc_06_tools_by_name() -> None:
    """Both orders go up with the same bytes; properties stay b, a."""
    first = kept([tool("zeta"), tool("alpha"), tool("mu")], order="name")["tools"]
    second = kept([tool("mu"), tool("zeta"), tool("alpha")], order="name")["tools"]
    assert names(first) == ["alpha", "mu", "zeta"] and json.dumps(first) == json.dumps(second)
    assert list(first[0]["function"]["parameters"]["properties"]) == ["b", "a"]


def test_pc_06_duplicates_stay_in_their_order() -> None:
    """And tool_choice is not touched."""
    choice = {"type": "function", "function": {"name": "dup"}}
    told = [tool("dup", "1"), tool("alpha"), tool("dup", "2")]
    sent = kept(told, order="name", tool_choice=choice)
    assert names(sent["tools"]) == ["alpha", "dup", "dup"]
    assert [t["function"]["description"] for t in sent["tools"][1:]] == ["1", "2"]
    assert sent["tool_choice"] is choice


def test_a_permutation_goes_in_the_sessions_order() -> None:
    """The tools stand at the front of the prompt."""
    before = [tool("zeta"), tool("alpha"), tool("mu")]
    assert kept(before[::-1], before)["tools"] == before


def test_another_set_of_tools_goes_as_it_came() -> None:
    """One more, one less, one changed, one doubled."""
    before = [tool("a"), tool("b"), tool("c")]
    changed = tool("a", "y")
    others = [[tool("c"), tool("b")], [*before[::-1], tool("d")], [tool("c"), tool("b"), changed], [tool("c"), *before]]
    for told in others:
        assert kept(told, before)["tools"] is told


def test_a_key_order_inside_a_tool_makes_it_another_tool() -> None:
    """It is another prompt too."""
    odd = {"function": {"name": "a"}, "type": "function"}
    even = {"type": "function", "function": {"name": "a"}}
    told = [even, tool("b")]
    assert kept(told, [tool("b"), odd])["tools"] is told


@given(st.lists(json_values(), max_size=5), st.randoms(use_true_random=False), st.sampled_from(["session", "name"]))
def test_whatever_tools_are_they_are_only_put_in_order(tools: list[Any], random: Any, order: str) -> None:
    """Nothing is lost, doubled or changed, and a second time nothing moves."""
    told = list(tools)
    random.shuffle(told)
    sent = kept(told, tools, order)["tools"]
    assert sorted(map(id, sent)) == sorted(map(id, told))
    assert kept(sent, sent, order)["tools"] is sent
    if order == "session":
        assert tool_digests({"tools": sent}) == tool_digests({"tools": tools})


def test_no_list_is_no_tools() -> None:
    """vLLM will say what it thinks of it."""
    assert kept("x")["tools"] == "x" and tool_digests({"tools": None}) == () and tool_digests({}) == ()
