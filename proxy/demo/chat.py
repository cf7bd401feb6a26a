"""A chat of six turns with a clock in its system prompt, told to an OpenAI-compatible server as Open WebUI tells it."""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

# About 300 words, 420 tokens of SmolLM2: long enough that recomputing it is felt on a CPU, short enough for a demo.
# The first line is what Open WebUI makes of "{{CURRENT_DATETIME}}": the seconds change with every request.
SYSTEM_PROMPT = """\
The current date and time is {now}. You are the help desk of the Harbour Cycling Club.

You answer questions of members and of people who may become members. You are friendly and calm, and you answer in two \
or three short sentences. If you do not know something, say so and give the address of the office, which is Harbour \
Street 12, next to the old fish market. Never invent prices, names or telephone numbers.

The club was founded by nine dock workers who rode to work together, and today it has about four hundred members. \
There are three groups. The morning group rides slowly and stops for coffee; it is the right one for beginners, for \
families and for anybody who comes back after an illness. The road group rides between sixty and ninety kilometres at \
a steady pace and waits at the top of every hill. The touring group plans journeys of several days, carries tents and \
cooks for itself.

Every rider needs a helmet, a working front and rear light, a spare inner tube and a bottle of water. Electric \
bicycles are welcome in the morning group and in the touring group, but not in the road group, because it is hard to \
ride together when the hills feel different to everyone. Children under twelve ride with a parent.

The workshop in the yard lends tools to members without a fee. A volunteer explains how to repair a puncture, how to \
adjust brakes and gears, and how to clean a chain. Parts are sold at the price that the club paid for them. Bicycles \
that nobody collects within three months are repaired and given to families who need one.

Membership runs for a calendar year and can be ended with a letter at any time. Guests may ride with any group twice \
before they decide. A member who cannot pay the fee should talk to the office: a solution has always been found, and \
nobody else hears of it. Photographs of a ride are published only if everyone in them agrees. The next journey of the \
touring group follows the river to its source; whoever wants to come should have ridden with the road group at least \
three times, because the last two days are in the mountains."""

QUESTIONS = (
    "Which group should a beginner choose?",
    "What do I have to bring with me?",
    "May I come with my electric bicycle?",
    "My tyre is flat. Who can help me?",
    "Can my daughter ride with us? She is nine.",
    "How do I become a member?",
)

SECOND = timedelta(seconds=1)
MAX_ANSWER_TOKENS = 64  # keeps a turn to a few seconds on a CPU


class ChatFailed(Exception):
    """The server answered a turn with an error, or its stream ended early; the text says which, in one sentence."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn cost, as vLLM's usage and our clock say."""

    prompt_tokens: int
    cached_tokens: int
    time_to_first_token_seconds: float
    answer: str

    @property
    def cached_share(self) -> float:
        """The part of the prompt, 0 to 1, that vLLM took from its prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """Where a chat is told: the base URL that a user would enter (with /v1), and what the requests carry besides."""

    base_url: str
    model: str
    headers: Mapping[str, str]
    extra: Mapping[str, object]


def play(
    line: Line,
    *,
    questions: Sequence[str] = QUESTIONS,
    clock: Callable[[], datetime] = datetime.now,
    told: Callable[[int, Turn], None] = lambda _number, _turn: None,
) -> list[Turn]:
    """Tell the chat and return its turns; `told` hears of each as it ends.  Raises ChatFailed, OSError.

    The history carries the answers as they were streamed, stripped of outer white space (as Open WebUI keeps them).
    """
    history: list[dict[str, str]] = []
    turns: list[Turn] = []
    now = clock()
    for number, question in enumerate(questions, start=1):
        history.append({"role": "user", "content": question})
        # Two turns within one second would show the same time, and hide what the chat is there to show.
        now = max(clock(), now + SECOND)
        system = {"role": "system", "content": SYSTEM_PROMPT.format(now=now.strftime("%Y-%m-%d %H:%M:%S"))}
        turn = ask(line, [system, *history])
        if answer := turn.answer.strip():  # an empty one is left out, as Open WebUI does
            history.append({"role": "assistant", "content": answer})
        turns.append(turn)
        told(number, turn)
    return turns


def ask(line: Line, messages: Sequence[Mapping[str, str]], *, max_tokens: int = MAX_ANSWER_TOKENS) -> Turn:
    """Stream one answer and measure it.  Raises ChatFailed when there is none, OSError when nothing listens."""
    body = {
        "stream": True,
        "model": line.model,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": max_tokens,
        "messages": messages,
        **line.extra,
    }
    where = urlsplit(line.base_url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=300)
    begun = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json", **line.headers}
        connection.request(
            "POST", f"{where.path}/chat/completions", json.dumps(body, ensure_ascii=False).encode(), headers
        )
        response = connection.getresponse()
        if response.status != 200:
            raise ChatFailed(f"status {response.status}: {_message(response.read())}")
        return _read(_events(response), begun)
    except (http.client.HTTPException, json.JSONDecodeError) as error:
        raise ChatFailed(f"the answer broke off ({type(error).__name__})") from error
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream until [DONE]; lines that carry none (comments, blanks) are passed over."""
    while raw := response.readline():
        if raw.startswith(b"data: "):
            data = raw[6:].strip()
            if data == b"[DONE]":
                response.read()  # to the end of the body: a client that leaves before it counts as one that left
                return
            yield json.loads(data)
    raise ChatFailed("the stream ended without [DONE]")


def _read(events: Iterator[dict[str, Any]], begun: float) -> Turn:
    words: list[str] = []
    first: float | None = None
    usage: dict[str, Any] = {}
    for event in events:
        if "error" in event:
            raise ChatFailed(str(event["error"].get("message")))
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            word = choice["delta"].get("content") or ""
            # A model may end without a word; its end is then the first that is seen of it.
            if first is None and (word or choice["finish_reason"]):
                first = time.perf_counter() - begun
            words.append(word)
    if first is None or not usage:
        raise ChatFailed("the stream held no answer" if first is None else "the stream held no usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn(usage["prompt_tokens"], cached, first, "".join(words))


def _message(raw: bytes) -> str:
    """Return the sentence in an OpenAI error body, else the beginning of the body."""
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")
