"""Step `keep_tools`: a tools list that is a permutation of the session's last one goes in that order."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from proxy.core.draft import Draft, Facts
from proxy.core.text import digest, packed


def tool_digests(rest: Mapping[str, object]) -> tuple[bytes, ...]:
    """Return a 16-byte digest of each tool of a request, in order; empty where there is no list of tools."""
    tools = rest.get("tools")
    return tuple(digest(packed(tool)) for tool in tools) if isinstance(tools, list) else ()


def list_digest(rest: Mapping[str, object]) -> bytes:
    """Return a digest of the list of tools as a whole; empty where there is none."""
    tools = rest.get("tools")
    return digest(packed(tools)) if isinstance(tools, list) else b""


def keep_tools(draft: Draft, facts: Facts) -> Draft:
    """Put the tools in the order of the session's last request, or by name where `tools_order` says so.

    Only whole tools move: keys inside schemas keep their order (a grammar generates in it), duplicates stay, equal
    names keep theirs.  MCP servers list tools in any order, and the tools stand at the front of the prompt.
    """
    tools = draft.rest.get("tools")
    if not isinstance(tools, list):
        return draft
    draft = replace(draft, tools=list_digest(draft.rest))
    # Nearly always the list is the last one, which one digest tells cheaper than one a tool.
    if len(tools) < 2 or (facts.tools_order == "session" and draft.tools == facts.tool_list):
        return draft
    ordered = _by_name(tools) if facts.tools_order == "name" else _as_before(tools, facts.tools)
    if all(a is b for a, b in zip(ordered, tools, strict=True)):
        return draft
    rest = {**draft.rest, "tools": ordered}
    return replace(draft, rest=rest, tools=list_digest(rest))


def _by_name(tools: Sequence[object]) -> list[object]:
    return sorted(tools, key=_name)


def _name(tool: object) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _as_before(tools: list[object], before: tuple[bytes, ...]) -> list[object]:
    digests = [digest(packed(tool)) for tool in tools]
    if tuple(digests) == before or sorted(digests) != sorted(before):
        return tools
    by_digest: dict[bytes, list[object]] = defaultdict(list)
    for tool, value in zip(tools, digests, strict=True):
        by_digest[value].append(tool)
    return [by_digest[value].pop(0) for value in before]
