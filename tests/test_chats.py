"""The last prompts of chats: few, bounded, for a minute."""

from proxy.chats import BRANCHES, KEPT_SECONDS, MOST_BYTES, Chats
from proxy.core.request import ChatRequest, Message
from proxy.store.sessions import SessionKey

KEY, OTHER = SessionKey(b"t" * 16, b"c" * 16, "m"), SessionKey(b"t" * 16, b"d" * 16, "m")
REPLY: Message = {"role": "assistant", "content": "yes"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(text: str, **rest: object) -> ChatRequest:
    return ChatRequest(({"role": "user", "content": text},), rest)


def test_a_prompt_is_there_while_it_runs_and_for_a_minute_after_its_answer() -> None:
    clock = Clock()
    chats = Chats(clock)
    held = chats.begin(KEY, request("a", tools=[1], temperature=1), 5)
    (running,) = chats.of(KEY)
    assert (running.reply, running.tokens, running.rest) == (None, 5, {"tools": [1]})
    clock.now = 30.0
    chats.end(held, REPLY, 9)
    (ended,) = chats.of(KEY)
    assert (ended.reply, ended.tokens) == (REPLY, 9) and chats.of(OTHER) == ()
    clock.now += KEPT_SECONDS
    assert chats.of(KEY) == ()


def test_an_answer_that_failed_leaves_nothing() -> None:
    chats = Chats()
    chats.end(chats.begin(KEY, request("a"), 5), None, None)
    assert chats.of(KEY) == ()


def test_a_few_branches_are_kept_newest_first() -> None:
    chats = Chats()
    for number in range(BRANCHES + 2):
        chats.begin(KEY, request(str(number)), 1)
    assert [p.messages[0]["content"] for p in chats.of(KEY)] == [str(n) for n in range(BRANCHES + 1, 1, -1)]


def test_all_of_them_have_a_bound() -> None:
    """The oldest go first, and ending what is gone is no failure."""
    chats = Chats()
    first = chats.begin(KEY, request("a" * (MOST_BYTES // 16)), 1)
    for number in range(8):
        chats.begin(SessionKey(b"t" * 16, bytes([number]) * 16, "m"), request("b" * (MOST_BYTES // 16)), 1)
    assert chats.of(KEY) == ()
    chats.end(first, REPLY, 2)
    assert chats.of(KEY) == ()
