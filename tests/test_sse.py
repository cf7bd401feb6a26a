"""Finding events in a byte stream, and letting whole ones through."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.sse import HELD_BYTES, EventGate, EventScanner, UsageFilter, without_field

USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
TEXT = 'data: {"choices":[{"index":0,"delta":{"content":"你好 🧠"}}]}\n\n'.encode()
DONE = b"data: [DONE]\n\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut `data` at these places, taken modulo its length."""
    marks = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(marks)]


def scan(chunks: list[bytes], limit: int = 1 << 20) -> list[bytes]:
    scanner = EventScanner(limit)
    return [event for chunk in chunks for event in scanner.feed(chunk)]


def through(gate: EventGate, chunks: list[bytes]) -> bytes:
    return b"".join([gate.feed(chunk) for chunk in chunks]) + gate.close()


def model_events(stream: bytes) -> list[bytes]:
    """The standard's rules in their plainest form, over the whole stream."""
    lines = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    events: list[bytes] = []
    data: list[bytes] = []
    for line in lines[:-1]:
        if not line:
            events += [b"\n".join(data)] if data else []
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line == b"data":
            data.append(b"")
    return events


END = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINE = st.one_of(
    st.sampled_from([b": ping", b"event: x", b"retry: 3000", b"data:", b"data", b"", b"id: 1", b"datax: 1"]),
    st.sampled_from([line.rstrip(b"\n") for line in (USAGE, TEXT, DONE)]),
    st.text(max_size=6).map(lambda text: b"data: " + text.replace("\r", "").replace("\n", "").encode()),
    st.sampled_from(
        [
            b'data: {"usage":null,"choices":[{"index":0,"usage":null}]}',
            b'data: {"choices":[{"x":"\\"usage\\":null,"}], "usage" : null , "z":1}',
            b'data: {"choices":[{}],"usage":{"a":[1,{"b":","}]}}',
        ]
    ),
)
STREAM = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(LINE, END, END, st.booleans()), max_size=12),
    st.sampled_from([b"", b"data: {", b"data: x\r", b": half", b'data: {"choices":[],"usage":{}}', b"\xe4\xbd"]),
).map(lambda parts: parts[0] + b"".join(a + e + (f if twice else b"") for a, e, f, twice in parts[1]) + parts[2])


@given(STREAM, st.lists(st.integers(0, 10_000), max_size=40))
def test_any_cutting_gives_the_events_of_the_standard(stream: bytes, places: list[int]) -> None:
    """Fast and slow paths, all line ends, cuts inside them and inside characters."""
    assert scan(cut(stream, places)) == model_events(stream)


@given(STREAM, st.lists(st.integers(0, 10_000), max_size=40))
def test_a_gate_changes_no_byte_however_the_stream_is_cut(stream: bytes, places: list[int]) -> None:
    """What comes out is what went in."""
    assert through(EventGate(), cut(stream, places)) == stream


@given(STREAM, st.lists(st.integers(0, 10_000), max_size=40))
def test_the_usage_filter_gives_the_same_bytes_however_the_stream_is_cut(stream: bytes, places: list[int]) -> None:
    """The reference is the whole stream in one piece, and one byte at a time."""
    whole = through(UsageFilter(), [stream])
    assert through(UsageFilter(), cut(stream, places)) == whole
    assert through(UsageFilter(), [bytes([byte]) for byte in stream]) == whole


@given(STREAM, st.lists(st.integers(0, 10_000), max_size=40))
def test_what_a_gate_lets_through_ends_between_events(stream: bytes, places: list[int]) -> None:
    """A comment of ours may be put in there: a scanner of the client's side says the same."""
    gate, client = EventGate(), EventScanner()
    for chunk in cut(stream, places):
        client.feed(gate.feed(chunk))
        if gate.at_boundary:
            assert client.at_boundary


@pytest.mark.parametrize("size", range(1, 8))
def test_every_cut_of_a_stream_passes_byte_for_byte(size: int) -> None:
    """Also inside a character of four bytes."""
    stream = TEXT + DONE
    chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert through(EventGate(), chunks) == stream
    assert [json.loads(event)["choices"][0]["delta"]["content"] for event in scan(chunks)[:1]] == ["你好 🧠"]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b'data:{"choices":[]}\r\n\r\ndata:[DONE]\r\n\r\n', [b'{"choices":[]}', b"[DONE]"]),
        (b'data: {"a":\r\ndata: 1}\r\n\r\n', [b'{"a":\n1}']),
        (b"event: x\ndata: {}\nid: 1\n\n", [b"{}"]),
        (b"\xef\xbb\xbfdata: {}\n\n", [b"{}"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b": ping\n\nretry: 3000\n\n", []),
        (b"data: unfinished\n", []),
    ],
)
def test_line_ends_and_fields_are_read_as_the_standard_says(stream: bytes, events: list[bytes]) -> None:
    """CRLF, lone CR, no space after the colon, several data lines, a byte order mark; cut at every place."""
    for place in range(len(stream) + 1):
        assert scan([stream[:place], stream[place:]]) == events


def test_a_place_for_a_comment_is_only_between_events() -> None:
    """Not in a line, not between the lines of an event, not between the two bytes of a line's end."""
    scanner = EventScanner()
    for chunk, boundary in ((b"", True), (b": pi", False), (b"ng\n", True), (b"data: 1\n", False), (b"\r", False)):
        scanner.feed(chunk)
        assert scanner.at_boundary is boundary
    scanner.feed(b"\n")
    assert scanner.at_boundary


def test_an_event_above_the_limit_is_skipped_and_the_next_one_found() -> None:
    """Whether it comes in one chunk or in many, in one line or in several."""
    for large in (b"data: " + b"a" * 200 + b"\n\n", b"data: " + b"a" * 60 + b"\ndata: " + b"b" * 60 + b"\n\n"):
        for size in (1, 7, 1000):
            scanner = EventScanner(100)
            stream = large + b"data: next\n\n"
            found = [e for at in range(0, len(stream), size) for e in scanner.feed(stream[at : at + size])]
            assert (found, scanner.skipped) == ([b"next"], 1)


@pytest.mark.parametrize("size", [131_073, 600_000, 5_000_000])
def test_a_very_long_line_costs_time_in_proportion_and_passes_unchanged(size: int) -> None:
    """In chunks as a socket gives them; five megabytes take far less than a second."""
    line = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * size + b'"}}]}\n\n'
    chunks = [line[at : at + 1400] for at in range(0, len(line), 1400)]
    begun = time.perf_counter()
    for gate in (EventGate(), UsageFilter()):
        assert through(gate, chunks) == line
    events = scan(chunks, 4 << 20)
    assert time.perf_counter() - begun < 2
    assert len(events) == (1 if size < 4 << 20 else 0)


def test_single_bytes_of_a_held_event_cost_linear_time() -> None:
    """The longest event that is held, a byte at a time."""
    line = b"data: " + b"\n".join([b"data: x"] * 8000) + b"\n\n"
    begun = time.perf_counter()
    assert through(EventGate(), [bytes([byte]) for byte in line]) == line
    assert time.perf_counter() - begun < 2


def test_the_usage_event_that_we_asked_for_is_taken_out() -> None:
    """And nothing else: content beside it, comments and [DONE] stay."""
    stream = TEXT + b": ping\n\n" + USAGE + DONE
    assert through(UsageFilter(), [stream]) == TEXT + b": ping\n\n" + DONE


def test_a_comment_right_before_the_usage_event_stays() -> None:
    """Comments are passed at once, so they cannot go with the event."""
    assert through(UsageFilter(), [b": ping\n" + USAGE]) == b": ping\n"


@pytest.mark.parametrize(
    ("event", "left"),
    [
        (b'data: {"a":1,"usage":null}\n\n', b'data: {"a":1}\n\n'),
        (b'data: {"usage":null,"a":1}\n\n', b'data: {"a":1}\n\n'),
        (b'data: {"a":[{"usage":null}], "usage": null, "b":1e400}\n\n', None),
        (b'data: {"a":[{"usage":null}], "usage": null, "b":1.0}\n\n', b'data: {"a":[{"usage":null}], "b":1.0}\n\n'),
        (b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":1}}\n\n', b'data: {"choices":[{"index":0}]}\n\n'),
        (b'data: {"usage":null}\n\n', b"data: {}\n\n"),
        (b'data: {"a":"\\"usage\\":null"}\n\n', None),
        (b'data: {"a":"usage"}\n\n', None),
        (b'data: {"usage":null\n\n', None),
        (b'data: ["usage"]\n\n', None),
        (b'data: {"choices":[],\r\ndata: "usage":{"prompt_tokens":1}}\r\n\r\n', b""),
        (b'data: {"choices":[],"usage":"none"}\n\n', b'data: {"choices":[]}\n\n'),
    ],
)
def test_a_usage_field_is_taken_out_of_the_top_level_only(event: bytes, left: bytes | None) -> None:
    """What is no JSON object stays as it is (None)."""
    assert through(UsageFilter(), [event]) == (event if left is None else left)


@given(st.dictionaries(st.text(max_size=8), st.recursive(st.none() | st.text() | st.integers(), st.lists), max_size=5))
def test_a_field_is_removed_as_if_it_had_never_been_there(body: dict[str, object]) -> None:
    """Whatever stands before and after it."""
    body.pop("usage", None)
    for place in range(len(body) + 1):
        items = list(body.items())
        items.insert(place, ("usage", {"usage": [None, "},"]}))
        for spaces in ((",", ":"), (" , ", " : ")):
            line = json.dumps(dict(items), separators=spaces).encode()
            assert json.loads(without_field(line, b"usage")) == body


def test_an_event_too_large_to_be_held_is_passed_as_it_comes() -> None:
    """Its end is still found, and the next event is held again."""
    gate = UsageFilter()
    first = gate.feed(b'data: {"usage":null,"a":"' + b"x" * HELD_BYTES)
    assert first and gate.half_sent
    rest = gate.feed(b'"}\n\n' + USAGE[:20])
    assert not gate.half_sent and not gate.at_boundary
    assert first + rest + gate.feed(USAGE[20:]) == b'data: {"usage":null,"a":"' + b"x" * HELD_BYTES + b'"}\n\n'


def test_a_half_event_is_held_back() -> None:
    """So that a stream that breaks off leaves only whole events behind."""
    gate = EventGate()
    assert gate.feed(TEXT + TEXT[:9]) == TEXT
    assert not gate.at_boundary and not gate.half_sent
    assert gate.close() == TEXT[:9]
