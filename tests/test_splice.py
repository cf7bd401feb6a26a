"""Changes go into the received bytes; everything else stays byte for byte."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.request import ChatRequest, Received, parse_body
from proxy.core.splice import fields_of, items_of, splice
from tests.strategies import json_values

KEYS = st.sampled_from(["model", "temperature", "stop", "tools", "é", 'a"b', "\u2028", ""])


def received(raw: bytes) -> Received:
    """Parse a chat request."""
    return parse_body(raw, max_messages=100, max_images=100)


def with_field(request: ChatRequest, **fields: object) -> ChatRequest:
    """Return the request with these fields set."""
    return replace(request, rest={**request.rest, **fields})


@st.composite
def spelled(draw: st.DrawFn, value: Any) -> str:
    """Spell a JSON value with white space, escapes and key order of its own."""
    indent = draw(st.sampled_from([None, 0, 3]))
    separators = draw(st.sampled_from([(",", ":"), (" ,\t", " :\n")])) if indent is None else None
    return json.dumps(value, ensure_ascii=draw(st.booleans()), indent=indent, separators=separators)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, dict[str, str]]:
    """Return a body and the spelling of each of its values."""
    fields = draw(st.dictionaries(KEYS, json_values(), max_size=4))
    roles = st.sampled_from(["system", "user", "assistant"])
    messages = draw(st.lists(st.fixed_dictionaries({"role": roles, "content": json_values()}), min_size=1, max_size=4))
    told = {key: draw(spelled(value)) for key, value in fields.items()}
    told["messages"] = "[ " + " , ".join([draw(spelled(message)) for message in messages]) + "\n]"
    order = draw(st.permutations(list(told)))
    gap = draw(st.sampled_from(["", " ", "\r\n\t"]))
    text = ",".join(f"{gap}{json.dumps(key)}{gap}:{gap}{told[key]}{gap}" for key in order)
    return f"{gap}{{{text}}}{gap}".encode("utf-8", "surrogatepass"), told


@given(bodies(), st.data())
@settings(max_examples=120, deadline=None)
def test_any_change_is_in_and_all_else_keeps_its_bytes(body: tuple[bytes, dict[str, str]], data: st.DataObject) -> None:
    """What is parsed from the result is what was wanted; each unchanged value stands there as it came."""
    raw, told = body
    try:
        got = received(raw)
    except Exception:  # too deep or no valid UTF-8: not this test's subject
        return
    names = data.draw(st.sets(st.sampled_from([*told, "new", "cache_salt"])))
    rest = dict(got.request.rest)
    for name in names - {"messages"}:
        if name in rest and data.draw(st.booleans()):
            del rest[name]
        else:
            rest[name] = data.draw(json_values())
    messages = list(got.request.messages)
    if "messages" in names:
        messages = data.draw(st.permutations(messages))
        messages.insert(data.draw(st.integers(0, len(messages))), {"role": "system", "content": "\u00e9 \ud800 new"})
        if data.draw(st.booleans()):
            messages.pop(0)
        messages = messages or [{"role": "user", "content": ""}]
    out = splice(got, ChatRequest(tuple(messages) if "messages" in names else got.request.messages, rest))
    assert json.loads(out) == {**rest, "messages": messages}
    for name, spelling in told.items():
        same = name not in names if name == "messages" else name in rest and rest[name] is got.request.rest.get(name)
        assert not same or spelling.encode() in out


@given(bodies())
@settings(max_examples=40, deadline=None)
def test_without_a_change_the_bytes_are_the_same_object(body: tuple[bytes, dict[str, str]]) -> None:
    """Nothing is written anew that did not change."""
    try:
        got = received(body[0])
    except Exception:
        return
    assert splice(got, got.request) is got.raw


def test_number_spelling_big_integers_and_escapes_survive_a_change() -> None:
    """Only the changed message and the new field differ (case PC-07)."""
    raw = b'{ "top_p":0.10, "seed":12345678901234567890123,  "messages":[{"role":"user","content":"\\u00e9 \xc3\xa9"},'
    raw += b' {"content" : "x","role":"user"}], "t":1E5,"z":-0.0 }'
    got = received(raw)
    changed = (got.request.messages[0], {"role": "user", "content": "y"})
    out = splice(got, replace(with_field(got.request, cache_salt="ab"), messages=changed))
    assert out == (
        b'{"cache_salt":"ab","top_p":0.10,"seed":12345678901234567890123,'
        b'"messages":[{"role":"user","content":"\\u00e9 \xc3\xa9"},{"role":"user","content":"y"}], "t":1E5,"z":-0.0 }'
    )


def test_pc_07_with_nothing_to_rewrite_the_bytes_are_those_received() -> None:
    """Key order of a schema, number spelling and escapes."""
    raw = b'{"model":"m","top_p":0.10,"messages":[{"content":"\xc3\xa9 \\u00e9","role":"user"}],"response_format":{'
    raw += (
        b'"type":"json_schema","json_schema":{"name":"o","schema":{"properties":{"zebra":{},"apple":{},"mango":{}}}}}}'
    )
    got = received(raw)
    assert splice(got, got.request) == raw
    salted = splice(got, with_field(got.request, cache_salt="x"))
    assert salted == b'{"cache_salt":"x",' + raw[1:]


def test_a_duplicate_salt_becomes_one() -> None:
    """Parsers disagree on which copy counts, so one is left (case SC-01)."""
    raw = b'{"cache_salt":"a","messages":[{"role":"user","content":"x"}],"cache_salt":"b","c\\u0061che_salt":"c"}'
    got = received(raw)
    out = splice(got, with_field(got.request, cache_salt="mine"))
    assert out.count(b"salt") == 1 and json.loads(out)["cache_salt"] == "mine"


def test_a_duplicate_salt_that_was_ours_already_becomes_one() -> None:
    """A client that sends its own salt last, and another's first, does not get two through."""
    raw = b'{"cache_salt":"other","messages":[{"role":"user","content":"x"}],"cache_salt":"mine"}'
    got = received(raw)
    out = splice(got, with_field(got.request, cache_salt="mine"[:2] + "ne"))
    assert json.loads(out)["cache_salt"] == "mine" and out.count(b"cache_salt") == 1


def test_a_removed_field_goes_in_all_its_copies() -> None:
    """A salt that must not go up goes up in no copy."""
    raw = b'{"cache_salt":"a","messages":[{"role":"user","content":"x"}],"cache_salt":"b"}'
    got = received(raw)
    assert splice(got, replace(got.request, rest={})) == b'{"messages":[{"role":"user","content":"x"}]}'


def test_of_messages_that_stand_twice_the_last_is_changed() -> None:
    """It is the one that every parser takes; the other is left as it is or left out."""
    raw = b'{"messages":[{"role":"user","content":"old"}],"messages":[{"role":"user","content":"x"}]}'
    got = received(raw)
    out = splice(got, replace(got.request, messages=({"role": "user", "content": "y"},)))
    assert json.loads(out)["messages"][0]["content"] == "y"


def test_a_lone_surrogate_is_written_as_an_escape() -> None:
    """It came as one; UTF-8 has no form for it."""
    got = received(b'{"messages":[{"role":"user","content":"\\ud800"}],"a":1}')
    out = splice(got, replace(got.request, messages=({"role": "user", "content": "\ud800!"},)))
    assert json.loads(out)["messages"][0]["content"] == "\ud800!"


def test_an_integer_beyond_64_bits_is_written_whole() -> None:
    """A changed field may hold one."""
    got = received(b'{"messages":[{"role":"user","content":"x"}]}')
    assert json.loads(splice(got, with_field(got.request, seed=2**70)))["seed"] == 2**70


def test_an_empty_object_takes_a_field() -> None:
    """On the routes without messages the body may be empty."""
    got = parse_body(b" { } ", max_messages=1, max_images=1, chat=False)
    assert json.loads(splice(got, with_field(got.request, a=1))) == {"a": 1}


def test_places_are_found_past_brackets_in_strings() -> None:
    """A string may hold anything."""
    text = '{"a":"}]{\\"","messages":[{"x":"],["}, 2 ,[]]}'
    fields = list(fields_of(text))
    assert (fields[0].key, text[fields[0].value_start : fields[0].end]) == ("a", '"}]{\\""')
    assert [text[a:b] for a, b in items_of(text, fields[1].value_start)] == ['{"x":"],["}', "2", "[]"]
