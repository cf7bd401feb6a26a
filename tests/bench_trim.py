"""What trimming costs the prefix cache: a long simulated chat, and a real vLLM with a small context.

`make bench-trim` prints both tables.  The first needs nothing; the second needs the environment of the demo.
"""

import argparse
import asyncio
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
from aiohttp import web
from rich.console import Console
from rich.table import Table

from proxy.app import build_app
from proxy.config import Config
from proxy.core.counting import Question
from proxy.core.draft import Cut, Facts, Lengths, Template, Trim
from proxy.core.estimate import likely, texts_of, utf8_bytes
from proxy.core.ledger import Ledger
from proxy.core.pipeline import rewrite
from proxy.core.request import ChatRequest, Message
from proxy.demo import recipe, server
from proxy.downstream.listener import Runner
from proxy.rewriting import COUNTED, LEFT_OUT
from tests.fake_engine import PrefixCache, Vocabulary, render
from tests.wire import LEAD, STEPS

TURNS = 400
CONTEXT_TOKENS = 32_768
RESERVE_TOKENS = 2048
LOW_SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
WORDS = ("the", "river", "turns", "north", "again", "where", "nine", "old", "mills", "stand", "empty", "and", "quiet")
TURN_TOKENS = 300
WINDOW_TURNS = 64  # that always fit
WINDOW = f"window: last {WINDOW_TURNS} turns"
MARK = "<|im_start|>"


def words(dice: random.Random, tokens: int) -> str:
    """Return a text of about so many tokens of the fake."""
    return " ".join(dice.choice(WORDS) for _ in range(max(tokens, 1)))


def chat(turns: int, seed: int = 4) -> Iterator[tuple[Message, list[Message]]]:
    """Yield the user's message of each turn and the messages that answer it, the last of them the reply.

    300 tokens a turn on average: short and long turns, tool loops, documents; all told as Open WebUI tells it.
    """
    dice = random.Random(seed)
    for number in range(turns):
        kind = dice.choices(("short", "usual", "long", "tools", "document"), (30, 48, 8, 6, 8))[0]
        ask, say = {"short": (12, 60), "usual": (40, 190), "long": (250, 700), "tools": (30, 120)}.get(kind, (320, 120))
        text = f"Turn {number}. {words(dice, dice.randint(ask // 2, ask * 3 // 2))}"
        if kind == "document":
            text = f'{LEAD}<source id="{number}">{text}</source>\n</context>\n\nWhat does it say about {number}?'
        answers: list[Message] = []
        for step in range(dice.randint(1, 2) if kind == "tools" else 0):
            name = f"call-{number}-{step}"
            call = {"id": name, "type": "function", "function": {"name": "look_up", "arguments": f'{{"n": {step}}}'}}
            answers.append({"role": "assistant", "content": "", "tool_calls": [call]})
            answers.append({"role": "tool", "tool_call_id": name, "content": words(dice, dice.randint(40, 160))})
        answers.append({"role": "assistant", "content": words(dice, dice.randint(say // 2, say * 3 // 2))})
        yield {"role": "user", "content": text}, answers


class Tokens(Vocabulary):
    """The fake's tokenizer, which forgets no message: tokens never span the mark at which a message begins."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        out: list[int] = []
        for i, piece in enumerate(text.split(MARK)):
            known = self._known.get(piece)
            if known is None:
                known = self._known[piece] = super().encode(MARK + piece)
            out += known if i else known[1:]
        return out


class Server:
    """A vLLM without a socket: its tokenizer, its template, its prefix cache, block by block."""

    def __init__(self) -> None:
        self.vocabulary = Tokens()
        self.cache = PrefixCache()
        self.prompt = self.cached = 0

    def count(self, question: Question) -> int:
        """Answer as /tokenize does."""
        body = {**question.rest, "messages": list(question.messages), "add_generation_prompt": question.generation}
        return len(self.vocabulary.encode(render(body)))

    def take(self, messages: Sequence[Message], reply: Message) -> int:
        """Take a prompt, enter it and its answer into the cache; return its tokens."""
        prompt = self.vocabulary.encode(render({"messages": list(messages)}))
        whole = render({"messages": [*messages, reply], "add_generation_prompt": False})
        self.prompt += len(prompt)
        self.cached += self.cache.hit(prompt)
        self.cache.store(self.vocabulary.encode(whole))
        return len(prompt)

    @property
    def reuse(self) -> float:
        """The share of all prompt tokens that came from the cache."""
        return self.cached / self.prompt


@dataclass(frozen=True)
class Result:
    """How one chat went: reuse, the share of its history that was sent on average, cuts, tokens of the largest
    prompt, prompts counted a request."""

    reuse: float
    kept: float
    cuts: int
    largest: int
    asked: float


SYSTEM: Message = {"role": "system", "content": "You are a helpful assistant. Answer in the language of the user."}


class Core:
    """The proxy's core before a server, as the shell drives it."""

    def __init__(self, server: Server, size: int | None, low_share: float) -> None:
        self._server, self._size, self._trim = server, size, Trim(low_share)
        self._ledger, self._counts = Ledger(64 << 20), dict[bytes, int]()
        self._cut: Cut | None = None
        self.asked = self.cuts = self.left_out = 0

    def send(self, messages: Sequence[Message], reply: Message) -> int:
        """Rewrite a request, count what that asks for, send it, remember it; return the prompt's tokens."""
        facts = Facts(
            STEPS - {"salt", "rank"},
            self._ledger,
            explicit=True,
            template=Template(system_in_place=True, users_in_a_row=True),
            lengths=Lengths(max_model_len=self._size),
            trim=self._trim,
            cut=self._cut,
        )
        request = ChatRequest(tuple(messages), {"max_tokens": RESERVE_TOKENS})
        done = rewrite(request, replace(facts, counts=self._counts))
        while done.questions:
            for question in done.questions:
                self._counts[question.key] = self._server.count(question)
            self.asked += len(done.questions)
            done = rewrite(request, replace(facts, counts=self._counts))
        node = self._ledger.record(done.records)
        self.cuts += done.cut != self._cut
        self._cut, self.left_out = done.cut, done.left_out
        tokens = self._server.take(done.request.messages, reply)
        assert not done.exact or done.counted == tokens
        node.upto, node.family = tokens, done.family
        self._ledger.add_reply(node, reply)
        return tokens


def play(turns: int, send: Callable[[list[Message], Message], int]) -> tuple[int, float, int]:
    """Play the chat; return the requests, the share of the history sent on average, the largest prompt's tokens."""
    messages: list[Message] = [SYSTEM]
    whole, requests, largest = Tokens(), 0, 0
    head = told = len(whole.encode(render({"messages": [SYSTEM]})))

    def size(message: Message) -> int:
        return len(whole.encode(render({"messages": [SYSTEM, message]}))) - head

    shares: list[float] = []
    for user, answers in chat(turns):
        messages.append(user)
        told += size(user)
        for message in answers:
            if message["role"] == "assistant":
                tokens = send(list(messages), message)
                requests, largest = requests + 1, max(largest, tokens)
                shares.append(tokens / told)
            messages.append(message)
            told += size(message)
    return requests, sum(shares) / len(shares), largest


def with_core(turns: int, size: int | None, low_share: float = 0.6) -> Result:
    """Play the chat through the proxy's core."""
    server = Server()
    core = Core(server, size, low_share)
    requests, kept, largest = play(turns, core.send)
    return Result(server.reuse, kept, core.cuts, largest, core.asked / requests)


def sliding(turns: int, size: int, last: int | None = None) -> Result:
    """Play the chat through what clients do: the oldest turns go, as many as must, or all but the `last` ones."""
    server, high, begin, cuts = Server(), size - RESERVE_TOKENS, 1, 0
    head = server.count(Question(b"", (SYSTEM,), {}, True))
    sizes: list[int] = [head]

    def send(messages: list[Message], reply: Message) -> int:
        nonlocal begin, cuts
        sizes.extend(server.count(Question(b"", (SYSTEM, m), {}, True)) - head for m in messages[len(sizes) :])
        starts = [i for i, m in enumerate(messages) if m["role"] == "user"]
        before = begin
        while begin < starts[-1] and head + sum(sizes[begin:]) > high:
            begin = next(start for start in starts if start > begin)
        begin = max(begin, starts[-last]) if last is not None and len(starts) > last else begin
        cuts += begin != before
        return server.take([SYSTEM, *messages[begin:]], reply)

    _, kept, largest = play(turns, send)
    return Result(server.reuse, kept, cuts, largest, 0.0)


def simulated(turns: int = TURNS, size: int = CONTEXT_TOKENS) -> dict[str, Result]:
    """Play every way; return the results by name."""
    out = {"no limit": with_core(turns, None), WINDOW: sliding(turns, size, last=WINDOW_TURNS)}
    out["window: turns that fit"] = sliding(turns, size)
    return out | {f"trim, low mark {low:.0%}": with_core(turns, size, low) for low in LOW_SHARES}


def simulated_table(results: dict[str, Result], turns: int, size: int) -> Table:
    """Return the first table."""
    table = Table(title=f"{turns} turns of about {TURN_TOKENS} tokens, context {size:,}: the block-exact fake")
    for name in ("way", "reuse", "of no limit", "history sent", "cuts", "largest prompt", "counts a request"):
        table.add_column(name, justify="left" if name == "way" else "right")
    free = results["no limit"].reuse
    for name, r in results.items():
        ratio, sent = f"{r.reuse / free:.3f}", f"{r.kept:.0%}"
        table.add_row(name, f"{r.reuse:.3f}", ratio, sent, str(r.cuts), f"{r.largest:,}", f"{r.asked:.1f}")
    return table


VLLM_TURNS = 60
VLLM_CONTEXT = 2048
VLLM_TURN_TOKENS = 80
VLLM_MODEL = "qwen2tiny"


@dataclass(frozen=True)
class Figures:
    """One turn before a real vLLM: status, its own counts, what the proxy counted and how it decided, in tokens."""

    status: int
    prompt: int
    cached: int
    left_out: int
    decided: int | None = None  # the count that a decision rested on
    estimate: float | None = None  # what it was likely to have, by the prompt before it


async def real_turns(session: aiohttp.ClientSession, url: str, turns: int = VLLM_TURNS) -> list[Figures]:
    """Play a chat of short turns through the proxy at `url`; the answers are what the model writes."""
    dice, out = random.Random(7), list[Figures]()
    messages: list[Message] = [SYSTEM]
    headers = {"X-OpenWebUI-User-Id": "bench", "X-OpenWebUI-Chat-Id": f"trim-{dice.random()}"}
    before = (0, 0)  # tokens and bytes of the last prompt
    for number in range(turns):
        messages.append({"role": "user", "content": f"Turn {number}. {words(dice, VLLM_TURN_TOKENS // 2)}"})
        half = VLLM_TURN_TOKENS // 2
        body = {"model": VLLM_MODEL, "messages": messages, "max_tokens": half, "seed": number, "ignore_eos": True}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            answer, told = await response.json(), response.headers
        if response.status != 200:
            out.append(Figures(response.status, 0, 0, 0))
            continue
        usage, left_out = answer["usage"], int(told.get(LEFT_OUT, "0"))
        size = sum(map(utf8_bytes, texts_of([SYSTEM, *messages[1 + left_out :]])))
        grown = before[0] and out[-1].left_out == left_out
        estimate = likely(*before, size - before[1]) if grown else None
        before = usage["prompt_tokens"], size
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        decided = int(told[COUNTED]) if COUNTED in told else None
        out.append(Figures(200, before[0], cached, left_out, decided, estimate))
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "so"})
    return out


@dataclass(frozen=True)
class Summary:
    """What a chat before a real vLLM came to: shares are of one, `off` is the worst estimate's distance."""

    refused: int
    cached: float
    cuts: int
    decided: int
    differed: int
    off: float
    largest: int


def summary(figures: Sequence[Figures]) -> Summary:
    """Sum up; estimates count from 500 tokens on, where a single word says nothing."""
    prompt = sum(f.prompt for f in figures)
    decided = [f for f in figures if f.decided is not None]
    off = [abs(f.estimate / f.prompt - 1) for f in figures if f.estimate is not None and f.prompt >= 500]
    return Summary(
        sum(f.status != 200 for f in figures),
        sum(f.cached for f in figures) / max(prompt, 1),
        len({f.left_out for f in figures} - {0}),
        len(decided),
        sum(f.decided != f.prompt for f in decided),
        max(off, default=0.0),
        max(f.prompt for f in figures),
    )


def real_table(found: Summary, turns: int) -> Table:
    """Return the second table."""
    table = Table(title=f"{turns} turns of about {VLLM_TURN_TOKENS} tokens, context {VLLM_CONTEXT:,}: a real vLLM")
    for name in ("refused", "cached", "cuts", "largest prompt", "decided by count", "of these wrong", "estimate off"):
        table.add_column(name, justify="right")
    numbers = (found.cuts, f"{found.largest:,}", found.decided, found.differed)
    table.add_row(str(found.refused), f"{found.cached:.2f}", *map(str, numbers), f"{found.off:.1%}")
    return table


async def through_a_proxy(upstream: str, turns: int) -> list[Figures]:
    """Play the chat through a proxy in this process, before the vLLM at `upstream`."""
    app = build_app(Config().with_values({"upstream.url": upstream, "listen.port": 0}))
    runner = Runner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            return await real_turns(session, f"http://127.0.0.1:{runner.addresses[0][1]}", turns)
    finally:
        await runner.cleanup()


def real(upstream: str | None, turns: int) -> list[Figures]:
    """Play the chat before the vLLM at `upstream`, or before one that is started for it."""
    if upstream is not None:
        return asyncio.run(through_a_proxy(upstream, turns))
    named = os.environ.get("PREFIX_PROXY_VLLM_CACHE")
    folder = Path(named).absolute() if named else None
    environment = (recipe.existing(folder) if folder else None) or recipe.ensure(folder, qwen=True)
    with TemporaryDirectory() as logs:
        flags = ("--max-model-len", str(VLLM_CONTEXT))
        with server.vllm(environment, log=Path(logs) / "vllm.log", model=VLLM_MODEL, flags=flags) as child:
            child.wait_ready()
            return asyncio.run(through_a_proxy(child.url, turns))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--vllm", metavar="URL", help="one that runs, with this model and context; else one is started")
    parser.add_argument("--no-vllm", action="store_true", help="only the simulation")
    parser.add_argument("--no-simulation", action="store_true", help="only the real vLLM")
    options = parser.parse_args()
    console = Console(width=120)
    if not options.no_simulation:
        console.print(simulated_table(simulated(options.turns), options.turns, CONTEXT_TOKENS))
    if not options.no_vllm:
        console.print(real_table(summary(real(options.vllm, VLLM_TURNS)), VLLM_TURNS))


if __name__ == "__main__":
    main()
