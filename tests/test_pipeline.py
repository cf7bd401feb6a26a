"""The pipeline under a model of Open WebUI: what must hold of everything that is sent, whatever users do."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.core.draft import Facts, Lengths, Template
from proxy.core.ledger import Ledger
from proxy.core.pipeline import MOVES_TEXT, PIPELINE, draft_of, moves_text, rewrite
from proxy.core.reject import Reject
from proxy.core.request import ChatRequest, Message
from proxy.core.text import text_of
from tests.strategies import actions, clients, json_values, odd_messages
from tests.webui import CLOCKS, Action, Client, Turn
from tests.wire import STEPS, TEMPLATES, Wire, without_notes

QUICK = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def played(client: Client, done: Sequence[Action]) -> Client:
    """Let a user do these things."""
    for action in done:
        action.do(client)
    return client


def lines_of(messages: Sequence[Message]) -> Counter[str]:
    """Count the lines of all messages, and the calls that they make."""
    out: Counter[str] = Counter()
    for message in messages:
        out.update(line.strip() for line in text_of(message).split("\n"))
        calls: Any = message.get("tool_calls") or []
        out.update(f"{c['id']} {json.dumps(json.loads(c['function']['arguments']))}" for c in calls)
    out.pop("", None)
    return out


def split_head(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Part the leading system messages from the rest."""
    size = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    return list(messages[:size]), list(messages[size:])


def whole_text(messages: Sequence[Message]) -> str:
    """Return all text parts of a prompt, one a line."""
    out: list[str] = []
    for message in messages:
        content: Any = message.get("content")
        parts = [str(p.get("text", "")) for p in content] if isinstance(content, list) else [content or ""]
        out += parts
    return "\n".join(out)


def check_head(turn: Turn) -> None:
    """Every line of the system message is in the prompt; a time of day may stand apart from its line."""
    head, _ = split_head(turn.told)
    prompt = whole_text(turn.sent)
    lines = set(prompt.split("\n"))
    goes_on = turn.told[-1]["role"] == "assistant"  # it keeps the time that it was begun with
    for line in (line for message in head for line in text_of(message).split("\n") if line):
        if turn.clock is not None and line == "".join(turn.clock):
            before, time, after = turn.clock
            assert line in lines or (f"{before}{after}" in lines and (goes_on or time.strip(" T") in prompt)), line
        else:
            assert line in lines, line


@given(clients(), actions())
@QUICK
def test_no_line_of_the_system_message_is_lost(client: Client, done: list[Action]) -> None:
    """Clock, memory, a second system message: what the client told is in every prompt."""
    for turn in played(client, done).turns:
        check_head(turn)


@given(clients(), actions())
@QUICK
def test_roles_and_order_are_kept(client: Client, done: list[Action]) -> None:
    """The proxy's own notes aside, every message stands where it stood."""
    for turn in played(client, done).turns:
        _, rest = split_head(turn.told)
        sent = without_notes(turn.sent)
        assert [m["role"] for m in sent] == [m["role"] for m in rest]
        assert [m.get("tool_call_id") for m in sent] == [m.get("tool_call_id") for m in rest]


@given(clients(), actions())
@QUICK
def test_no_line_of_a_message_is_lost_or_doubled(client: Client, done: list[Action]) -> None:
    """Documents may come back with their message; everything else is as often in the prompt as it was told."""
    for turn in played(client, done).turns:
        _, rest = split_head(turn.told)
        told, sent = lines_of(rest), lines_of(without_notes(turn.sent))
        assert not told - sent, f"lost: {told - sent}"
        # A tool result carries the newest time and memory at its end, and keeps what it once carried.
        more = [line for line in sent - told if "says thing" in line and not line.startswith("- memory says")]
        assert not [line for line in more if line not in client.blocks], more


@given(clients(), actions())
@QUICK
def test_what_a_user_deleted_stays_deleted(client: Client, done: list[Action]) -> None:
    """An edit, sent again or only saved, is never undone."""
    for action in done:
        before = len(client.turns)
        action.do(client)
        for turn in client.turns[before:]:
            told = lines_of(turn.told)
            back = [line for line in lines_of(turn.sent) if line in client.gone and line not in told]
            assert not back, back


@given(clients(), actions(("say", "repeat", "image", "tools", "memory", "cites"), most=7))
@QUICK
def test_a_chat_that_grows_keeps_its_prefix(client: Client, done: list[Action]) -> None:
    """Each prompt begins with the last one and the reply as it was generated, whatever clock and memory do."""
    sent: tuple[Message, ...] = ()
    asked = client.wire.send

    def watched(messages: Sequence[Message], **rest: object) -> tuple[Message, ...]:
        nonlocal sent
        now = asked(messages, **rest)
        if client.grows:
            assert client.generated is not None
            reply = {k: v for k, v in client.generated.items()}
            assert json.dumps(now[: len(sent)]) == json.dumps(sent)
            assert now[len(sent)] == reply
        sent = now
        return now

    client.wire.send = watched  # type: ignore[method-assign]  # only looks at what passes
    played(client, done)


@given(clients(), actions(("say", "repeat", "tools", "regenerate", "edit", "twice", "arrow", "failed", "stopped")))
@QUICK
def test_a_branch_keeps_what_stands_before_it(client: Client, done: list[Action]) -> None:
    """After any regeneration, edit or arrow the next request that only appends has a prefix among those sent."""
    played(client, done)
    Action("say").do(client)
    turn = client.turns[-1]
    generated = [t.sent for t in client.turns[:-1]]
    _, told = split_head(turn.told)
    best = max((_common(turn.sent, sent) for sent in generated), default=0)
    equal = max((_common(told, split_head(t.told)[1]) for t in client.turns[:-1]), default=0)
    if not client.clock and not client.memory:
        assert best >= equal


def _common(a: Sequence[Message], b: Sequence[Message]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(clients(), actions())
@QUICK
def test_with_every_step_off_nothing_changes(client: Client, done: list[Action]) -> None:
    """The request that goes up is the very object that came."""
    client.wire.steps = frozenset()
    for turn in played(client, done).turns:
        assert [dict(m) for m in turn.sent] == turn.told


@given(clients(), actions())
@settings(QUICK, max_examples=60)
def test_profile_safe_moves_no_text(client: Client, done: list[Action]) -> None:
    """White space and argument spelling of replies come back; users' and system messages go as they came."""
    client.wire.steps = frozenset(STEPS - {"move_volatile", "move_midloop", "dedupe_context"})
    client.wire.whitespace_only = True
    for turn in played(client, done).turns:
        assert len(turn.sent) == len(turn.told)
        for sent, told in zip(turn.sent, turn.told, strict=True):
            if told["role"] == "assistant":
                assert text_of(sent).strip() == text_of(told).strip()
            else:
                assert sent == told


@given(st.lists(st.tuples(st.booleans(), actions(most=2)), min_size=2, max_size=5), st.sampled_from(TEMPLATES))
@settings(QUICK, max_examples=60)
def test_chats_found_by_content_get_no_text_of_each_other(
    turns: list[tuple[bool, list[Action]]], template: Template
) -> None:
    """Two users whose chats open alike share a session by content: neither reads what only the other was told."""
    ledger = Ledger(1 << 20)
    both = [
        Client(Wire(template, explicit=False, ledger=ledger), CLOCKS[0], "You help.", count=n * 10**6) for n in (1, 2)
    ]
    for first, done in turns:
        client = both[not first]
        Action("repeat").do(client)
        for action in done:
            action.do(client)
    for mine, other in (both, both[::-1]):
        told = {
            line for turn in other.turns for m in turn.told for line in text_of(m).split("\n") if "says thing" in line
        }
        for turn in mine.turns:
            assert not told & set(whole_text(turn.sent).split("\n"))


@given(odd_messages(), odd_messages(), st.sampled_from(TEMPLATES))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_messages_make_a_step_fail(one: list[Message], two: list[Message], template: Template) -> None:
    """Whatever a client sends, twice over: no step raises anything, and the answer can be remembered."""
    wire = Wire(template, tags=("x",))
    for messages in (one, [*one, *two], two):
        done = wire.rewritten(messages)
        json.dumps([dict(m) for m in done.request.messages])
        wire.answered({"role": "assistant", "content": "ok"})


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "tools",
                "max_tokens",
                "max_completion_tokens",
                "n",
                "stream",
                "cache_salt",
                "response_format",
                "max_expected_tokens",
                "chat_template",
            ]
        ),
        json_values(),
    )
)
@settings(max_examples=100, deadline=None)
def test_no_field_makes_a_step_fail(rest: dict[str, Any]) -> None:
    """Only Reject comes out of a pipeline, and it names its field."""
    facts = Facts(STEPS, Ledger(1 << 16), lengths=Lengths(100, None, 1000), salt="ab", tools=(b"x" * 16,))
    try:
        done = rewrite(ChatRequest(({"role": "user", "content": "hi"},), rest), facts)
    except Reject as refusal:
        assert refusal.status == 400 and refusal.param
    else:
        assert done.failed == ()


def test_a_lone_surrogate_passes_every_step() -> None:
    """It comes out of an escape that only Python's json reads."""
    wire = Wire()
    told: list[Message] = [{"role": "system", "content": "\ud800 now 10:00"}, {"role": "user", "content": "\udfff"}]
    assert "\udfff" in whole_text(wire.send(told))


def test_the_same_request_twice_is_sent_alike() -> None:
    """Rewriting reads the ledger and changes nothing in it: the fallback may be made at any time."""
    wire = Wire()
    told = [{"role": "system", "content": "Now: 2026-01-02 10:00:01."}, {"role": "user", "content": "hi"}]
    request = ChatRequest(tuple(told), {})
    first = rewrite(request, wire.facts())
    second = rewrite(request, wire.facts())
    assert first.request == second.request and list(wire.ledger.nodes()) == []


def test_the_trail_names_only_steps_that_changed_something() -> None:
    """A request that nothing is to be done to keeps its own object and has no trail."""
    request = ChatRequest(({"role": "user", "content": "hi"},), {"model": "m"})
    done = rewrite(request, Facts(STEPS, Ledger(1 << 16)))
    assert done.trail == () and done.request is request


def test_true_is_not_one_when_changes_are_looked_for() -> None:
    """1 == True == 1.0 in Python, never in JSON."""
    request = ChatRequest(({"role": "user", "content": "hi"},), {"max_tokens": 10.0})
    done = rewrite(request, Facts(STEPS, Ledger(1 << 16), lengths=Lengths(10, None, 100)))
    assert done.request.rest["max_tokens"] == 10


def test_requests_about_exactly_their_prompt_are_left_alone() -> None:
    """echo, prompt_logprobs and their like: limits and salt only."""
    told = ({"role": "system", "content": "Now: 2026-01-02 10:00:01."}, {"role": "user", "content": "hi"})
    for name in ("echo", "prompt_logprobs", "return_token_ids", "truncate_prompt_tokens", "documents", "chat_template"):
        assert not moves_text({name: 1})
        done = rewrite(ChatRequest(told, {name: 1}), Facts(STEPS, Ledger(1 << 16), salt="aa"))
        assert done.request.messages == told and done.trail == ("salt",)
    assert moves_text({"echo": False, "documents": None})


def test_the_order_is_as_designed() -> None:
    """Tools, history, volatile text, the rest; what moves text is known by name."""
    names = [name for name, _ in PIPELINE]
    assert (
        names.index("restore_history")
        < names.index("move_volatile")
        < names.index("clamp_lengths")
        < names.index("salt")
    )
    assert {"restore_history", "move_volatile"} <= MOVES_TEXT


def test_leading_system_messages_are_the_head() -> None:
    """A system message later on is a message like any other."""
    told: list[Message] = [{"role": r, "content": "x"} for r in ("system", "developer", "user", "system", "user")]
    draft = draft_of(ChatRequest(tuple(told), {}))
    assert len(draft.head) == 2 and [e.role for e in draft.entries] == ["user", "system", "user"]
