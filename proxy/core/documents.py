"""Machine-made blocks at the front of a user message: Open WebUI's documents, search results and tool citations."""

import re
from collections.abc import Collection

POINTER = "as above"
AS_BEFORE = "(Respond to the query as instructed for the context above.)\n"
"""What stands in place of instructions that stand earlier in the same prompt."""
LEAST_INSTRUCTIONS = 200
_ID = re.compile(r'<source( id="[^"<>]{1,40}")')
_SOURCE = re.compile(r"^<source[ >]", re.MULTILINE)  # on a line of its own: instructions speak of the tag too
_OPENINGS = (("<context>", "</context>"), ("<source", "</source>"), ("<attached_files>", "</attached_files>"))


def is_machine_made(block: str, leads: tuple[str, ...]) -> bool:
    """Say whether `block` (the front of a message, up to what the user wrote) is one that a program puts there.

    A configured lead, or one `<context>`, `<source>` or `<attached_files>` element, ending in its closing tag on a
    line of its own and a blank line.
    """
    if block.endswith("\n") and block.startswith((*leads, AS_BEFORE)):
        return True
    return any(block.startswith(opening) and block.endswith(f"\n{closing}\n\n") for opening, closing in _OPENINGS)


def sources_of(text: str) -> list[tuple[int, int]]:
    """Return where each `<source ...>...</source>` element stands in `text` (characters), in order; linear in time."""
    out = []
    at = 0
    while (match := _SOURCE.search(text, at)) is not None:
        end = text.find("</source>", match.end())
        if end < 0:
            break
        at = end + len("</source>")
        out.append((match.start(), at))
    return out


def instructions_of(text: str) -> str | None:
    """Return the instructions in front of a context, from a task's lead to `<context>`; None without them."""
    end = text.find("\n<context>\n")
    if end < 0:
        return None
    start = text.rfind("### Task:\n", 0, end)
    return text[start:end] if start >= 0 and end - start >= LEAST_INSTRUCTIONS else None


def shared_characters(block: str, later: str) -> int:
    """Return how many characters of `block` stand verbatim in `later` too: source elements and instructions."""
    told = {later[a:b] for a, b in sources_of(later)}
    same = sum(b - a for a, b in sources_of(block) if block[a:b] in told)
    lead = instructions_of(block)
    return same + (len(lead) if lead is not None and lead == instructions_of(later) else 0)


def pointed(text: str, sources: Collection[str], leads: Collection[str]) -> str:
    """Return `text` with pointers in place of the source elements in `sources` and of instructions in `leads`.

    Neighbours with the same id share one pointer.  The rest of the text is as it was.
    """
    out: list[str] = []
    at, last = 0, ""
    for start, end in sources_of(text):
        element = text[start:end]
        if element not in sources:
            continue
        between, pointer = text[at:start], _pointer(element)
        if pointer != last or between.strip():
            out += [between, pointer]
        at, last = end, pointer
    out.append(text[at:])
    short = "".join(out)
    lead = instructions_of(short)
    return short.replace(lead, AS_BEFORE, 1) if lead is not None and lead in leads else short


def _pointer(element: str) -> str:
    match = _ID.match(element)
    return f"<source{match.group(1) if match else ''}>{POINTER}</source>"
