"""How a text of ours joins a message: at the end of a tool result, or in front of a user's words."""

from proxy.core.request import Message


def appended(message: Message, text: str) -> Message:
    """Return the message with `text` after its content, a blank line between; list content gets a text part."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}
    return {**message, "content": f"{content if isinstance(content, str) else ''}\n\n{text}"}


def in_front(message: Message, text: str) -> Message:
    """Return a user message with `text` as a text part before its words: the form that every template takes."""
    content = message.get("content")
    rest = (
        content
        if isinstance(content, list)
        else [{"type": "text", "text": content if isinstance(content, str) else ""}]
    )
    return {**message, "content": [{"type": "text", "text": text}, *rest]}


def fenced(text: str, marker: str) -> str:
    """Return `text` in a delimiter that a user cannot forge, for where it stands among the user's own words."""
    return f"[{marker}]\n{text}\n[/{marker}]"
