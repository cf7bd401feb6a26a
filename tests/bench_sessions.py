"""How much memory sessions take: 10,000 chats of 20 turns, each chat with a document, through the core and the table.

`python -m tests.bench_sessions` prints the growth of this process.  The budget is that of proxy/README.md: 300 MB.
"""

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from proxy.config.load import load_settings
from proxy.core.draft import DOCUMENT_LEADS, Facts, Template
from proxy.core.identity import Identity
from proxy.core.ledger import Ledger, Record
from proxy.core.pipeline import PIPELINE, rewrite
from proxy.core.request import ChatRequest, Message
from proxy.metrics import Metrics
from proxy.sessions import Sessions
from proxy.store.sessions import MEMORY, open_store

BUDGET_MB = 300
STEPS = frozenset(name for name, _ in PIPELINE)


def turn_of(chat: int, turn: int, size: int) -> Message:
    """Return a question, with a document of `size` characters in front as Open WebUI puts it, or without one (0)."""
    question = f"What of fact {turn} in chat {chat}? " + "Please tell me more about it. " * 3
    if not size:
        return {"role": "user", "content": question}
    words = f"Fact {turn} of chat {chat}. " * (size // 20)
    document = f'<context>\n<source id="1" name="d{turn}.txt">{words[:size]}</source>\n</context>\n\n'
    return {"role": "user", "content": f"{DOCUMENT_LEADS[0]}.\n{document}{question}"}


async def fill(sessions: Sessions, chats: int, turns: int, documents: int, size: int) -> None:
    """Have every chat ask `turns` questions, the first `documents` of them about a document, and be answered."""
    for chat in range(chats):
        who = Identity(f"user {chat % 100}", True, f"chat {chat}", None, None, True)
        session = await sessions.find(who, "model", ())
        messages: list[Message] = []
        for turn in range(turns):
            clock = f"You help. Now: 2026-01-02 10:{turn:02}:{chat % 60:02} UTC."
            messages.append(turn_of(chat, turn, size if turn < documents else 0))
            request = ChatRequest(({"role": "system", "content": clock}, *messages), {"model": "model"})
            facts = Facts(STEPS, session.ledger, explicit=True, template=Template(True, True))
            records = rewrite(request, facts).records
            answer: Message = {"role": "assistant", "content": f"It is {turn}. " + "That is all that is known. " * 10}
            sessions.touch(session, (), partial(_up, session.ledger, records, answer))
            messages.append(answer)


def _up(ledger: Ledger, records: Sequence[Record], answer: Message) -> None:
    ledger.add_reply(ledger.record(records), answer)


def resident_mb() -> float:
    """Return what this process holds in memory, in MB (Linux)."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def measure(chats: int, turns: int, documents: int, size: int) -> float:
    """Fill a table and print what it takes; return the process's MB."""
    config = replace(load_settings({}).config, database=MEMORY)
    async with open_store(MEMORY) as store:
        sessions = Sessions(config, store, Metrics())
        before = resident_mb()
        await fill(sessions, chats, turns, documents, size)
        await store.flush()
        begun = time.perf_counter()
        gc.collect()
        seconds = time.perf_counter() - begun
        held = resident_mb()
        live = sessions.list()
        counted = sum(info.size_bytes for info in live) / 2**20
        print(
            f"{len(live)} live sessions of {turns} turns, {documents} documents of {size} characters: {held:.0f} MB"
            f" ({before:.0f} before), counted {counted:.0f} MB, a full collection {seconds * 1000:.0f} ms"
        )
    return held


def main() -> int:
    """Measure; return 1 if the budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--documents", type=int, default=1, help="turns of a chat that bring a document")
    parser.add_argument("--size", type=int, default=2000, help="characters of a document")
    args = parser.parse_args()
    held = asyncio.run(measure(args.chats, args.turns, args.documents, args.size))
    return 0 if held < BUDGET_MB else 1


if __name__ == "__main__":
    sys.exit(main())
