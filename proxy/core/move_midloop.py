"""Step `move_midloop`: a block put before an already-sent user message in a tool loop goes to the newest result."""

from dataclasses import replace

from proxy.core.draft import Draft, Entry, Facts
from proxy.core.notes import appended
from proxy.core.text import digest, encoded, first_text, with_first_text

KIND = "midloop"


def move_midloop(draft: Draft, facts: Facts) -> Draft:
    """Put the blocks that `restore_history` took off at the end of the newest tool message, once each.

    Open WebUI prepends its document template to the user message once a citing tool has answered, and takes it off
    again with the next turn.  Tool results keep their order.  Where the newest message is no tool result the block
    stays where the client put it.
    """
    if not any(entry.midloop for entry in draft.entries):
        return draft
    last = len(draft.entries) - 1
    if draft.entries[last].role != "tool":
        return replace(draft, entries=tuple(_as_told(entry) for entry in draft.entries))
    told = {value for entry in draft.entries for kind, value in entry.blocks if kind == KIND}
    for block in dict.fromkeys(entry.midloop for entry in draft.entries if entry.midloop):
        value = digest(KIND.encode(), encoded(block))
        newest = draft.entries[last]
        if value not in told:
            message, blocks = appended(newest.message, block.rstrip("\n")), (*newest.blocks, (KIND, value))
            draft = draft.with_entry(last, newest._replace(message=message, node=None, blocks=blocks))
    return draft


def _as_told(entry: Entry) -> Entry:
    if not entry.midloop:
        return entry
    text = entry.midloop + (first_text(entry.message) or "")
    return entry._replace(message=with_first_text(entry.message, text), node=None)
