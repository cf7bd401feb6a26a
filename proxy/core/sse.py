"""Server-sent events: finding them in a byte stream, however it is cut, and taking one kind out (HTML standard, 9.2).

The scanner looks at a copy.  The gates stand in the way of the bytes: they let only whole events through, so that a
stream that breaks off never leaves half an event behind, and hold back no more than one event's beginning.
"""

import re

import orjson

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
# Above this an event is no longer held until it is whole, and is never changed.
HELD_BYTES = 64 * 1024
MAX_EVENT_BYTES = 4 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
# A line's end is one of three; the atomic group keeps "\r\n" from being read as two.
_EVENT_END = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_LINE_END = re.compile(rb"\r\n|\r|\n")


class EventScanner:
    """Finds the data of each event.  Linear in time; an event above `max_event_bytes` is skipped and counted."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit = max_event_bytes
        self._line = bytearray()  # an unfinished line, at most `limit` of it
        self._data: list[bytes] = []  # the data lines of the unfinished event
        self._size = 0  # bytes in `_data`, with the line feeds that join them
        self._too_long = False  # the unfinished event will be skipped
        self._begun = False  # the unfinished event has a line that is no comment
        self._after_cr = False  # a line feed that comes next belongs to a line that is over
        self._first = True
        self.skipped = 0

    @property
    def at_boundary(self) -> bool:
        """Whether the bytes so far end between two events, where a line may be put in."""
        return not (self._begun or self._line or self._after_cr)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes; return the data of each event that they complete (its lines joined by line feeds)."""
        found: list[bytes] = []
        # Nearly every chunk is whole events that end in line feeds.
        whole = chunk.endswith(b"\n\n") and b"\r" not in chunk and not (self._begun or self._line or self._after_cr)
        if whole and chunk.startswith(b"data: "):
            self._first = False
            self._feed_whole(chunk, found)
        else:
            self._feed_lines(chunk, found)
        return found

    def _feed_whole(self, chunk: bytes, found: list[bytes]) -> None:
        for event in chunk[:-2].split(b"\n\n"):
            if event.startswith(b"data: ") and b"\n" not in event and len(event) <= self._limit:
                found.append(event[6:])
            elif event:
                self._feed_lines(event + b"\n\n", found)

    def _feed_lines(self, chunk: bytes, found: list[bytes]) -> None:
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        lines = chunk.splitlines(keepends=True)
        for line in lines:
            text = line.rstrip(b"\r\n")
            if len(self._line) + len(text) > self._limit:
                self._too_long = self._begun = True
                self._line += text[: self._limit - len(self._line)]
            else:
                self._line += text
            if len(text) != len(line):
                self._end_line(found)
        self._after_cr = chunk.endswith(b"\r") or (self._after_cr and not chunk)

    def _end_line(self, found: list[bytes]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._first:
            self._first = False
            line = line.removeprefix(_BOM)
        if not line:
            self._end_event(found)
        elif not line.startswith(b":"):
            self._begun = True
            name, _, value = line.partition(b":")
            if name == b"data":
                self._add(value.removeprefix(b" "))

    def _add(self, value: bytes) -> None:
        self._size += len(value) + 1
        if self._size > self._limit:
            self._too_long = True
            self._data.clear()
        if not self._too_long:
            self._data.append(value)

    def _end_event(self, found: list[bytes]) -> None:
        if self._too_long:
            self.skipped += 1
        elif self._data:
            found.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
        self._data.clear()
        self._size = 0
        self._too_long = self._begun = False


class EventGate:
    """Lets whole events through, byte for byte; the beginning of one is held back, at most `HELD_BYTES` of it."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._searched = 0  # where in `_held` an event's end may still begin
        self._passing = False  # within an event that is too large to be held
        self._in_comment = False

    @property
    def at_boundary(self) -> bool:
        """Whether what was let through ends between two events and nothing is held back."""
        return not (self._held or self._passing or self._in_comment)

    @property
    def half_sent(self) -> bool:
        """Whether what was let through ends within an event."""
        return self._passing or self._in_comment

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return those that may go."""
        clear = not (self._held or self._passing or self._in_comment)
        if clear and chunk.endswith(b"\n\n") and b"\r" not in chunk and not self._concerns(chunk):
            return chunk
        self._held += chunk
        out: list[bytes] = []
        while self._step(out):
            pass
        return b"".join(out)

    def close(self) -> bytes:
        """Return what is held back, at the regular end of a stream."""
        rest = bytes(self._held)
        self._held.clear()
        return rest if self._passing or self._in_comment or not rest else self._changed(rest)

    def _concerns(self, data: bytes) -> bool:
        """Tell whether `data` may hold an event that is to be changed."""
        return False

    def _changed(self, event: bytes) -> bytes:
        """Return what goes in place of one whole event."""
        return event

    def _step(self, out: list[bytes]) -> bool:
        """Let go of one comment or event, or of part of one; return whether there may be more."""
        held = self._held
        if not held:
            return False
        if not self._passing and (self._in_comment or held[0] in b":\r\n"):
            return self._pass_idle_line(out)
        found = _EVENT_END.search(held, self._searched)
        # A carriage return at the very end may be half of a line's end.
        if found is None or (found.end() == len(held) and held.endswith(b"\r")):
            self._searched = max(0, len(held) - 4)
            if self._passing or len(held) > HELD_BYTES:
                self._pass_part(out)
            return False
        event = self._take(found.end())
        out.append(event if self._passing or len(event) > HELD_BYTES else self._changed(event))
        self._passing = False
        return True

    def _pass_idle_line(self, out: list[bytes]) -> bool:
        """Let comments and blank lines before an event go at once: they are no part of it, and tell that we live."""
        held = self._held
        found = _LINE_END.search(held)
        unsure = found is not None and found.end() == len(held) and held.endswith(b"\r")
        if found is None or unsure:
            text = self._take(len(held) if found is None else found.start())
            self._in_comment = self._in_comment or bool(text)
            out.append(text)
            return False
        out.append(self._take(found.end()))
        self._in_comment = False
        return True

    def _pass_part(self, out: list[bytes]) -> None:
        self._passing = True
        out.append(self._take(len(self._held.rstrip(b"\r\n"))))

    def _take(self, count: int) -> bytes:
        taken = bytes(self._held[:count])
        del self._held[:count]
        self._searched = 0
        return taken


class UsageFilter(EventGate):
    """A gate that takes out the usage event that we asked for and the client did not, and `usage` fields beside it."""

    def _concerns(self, data: bytes) -> bool:
        return b'"usage"' in data

    def _changed(self, event: bytes) -> bytes:
        if b'"usage"' not in event:
            return event
        lines = event.splitlines(keepends=True)
        data = [index for index, line in enumerate(lines) if line.startswith(b"data:")]
        try:
            body = orjson.loads(b"\n".join(lines[index][5:].strip() for index in data))
        except ValueError:
            return event
        if not isinstance(body, dict) or "usage" not in body:
            return event
        if body.get("choices") == [] and isinstance(body["usage"], dict):
            return b""
        if len(data) == 1:
            lines[data[0]] = without_field(lines[data[0]], b"usage")
        return b"".join(lines)


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],]')


def without_field(line: bytes, name: bytes) -> bytes:
    """Return a line that holds one JSON object without its top-level field `name`; all other bytes stay."""
    depth, comma, begin, key = 0, -1, -1, b'"' + name + b'"'
    for token in _TOKEN.finditer(line):
        text = token.group()
        if text in (b"}", b"]"):
            depth -= 1
        if begin >= 0 and (depth, text) in ((1, b","), (0, b"}")):
            # One comma goes too: the one before the field, or the one after it if it is the first.
            end = token.end() if begin > comma and text == b"," else token.start()
            return line[:begin] + line[end:]
        if text in (b"{", b"["):
            depth += 1
        elif depth == 1 and text == b",":
            comma = token.start()
        elif depth == 1 and text == key and line[token.end() :].lstrip().startswith(b":"):
            begin = comma if comma >= 0 else token.start()
    return line
