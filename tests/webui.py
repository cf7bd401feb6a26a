"""Open WebUI as a model: the page, its database, and what a user does; chats grow, change and go back as on the wire.

Every line that anybody writes is told from every other by a number, so that a line which is lost, doubled or comes back
can be named.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from proxy.core.request import Message
from proxy.core.text import text_of
from tests.wire import LEAD, Wire

# How a line says the time: what stands before it, the time, what stands after it.
CLOCKS: tuple[tuple[str, str, str], ...] = (
    ("Now: 2026-01-02", " {h:02}:{m:02}:{s:02} UTC", ". Rules: be brief."),
    ("The current time is", " {h12}:{m:02} PM", "."),
    ("Date: January 2, 2026", " {h12}:{m:02}:{s:02} PM", ""),
    ("当前时间：2026年1月2日", " {h:02}:{m:02}", "。请简短回答。"),
    ("Current date and time: 2026-01-02", "T{h:02}:{m:02}:{s:02}Z", ""),
    ("Aktuelle Uhrzeit:", " {h:02}:{m:02}", " Uhr"),
)


@dataclass
class Turn:
    """What was told and what went up, for the checks."""

    told: list[Message]
    sent: tuple[Message, ...]
    clock: tuple[str, str, str] | None
    grown: bool  # the client only appended to what the last request and its whole answer were


@dataclass
class Client:
    """Open WebUI: keeps the messages, tells them stripped and re-serialised, asks, and shows what comes."""

    wire: Wire
    clock: tuple[str, str, str] | None = None
    system: str = ""
    two_systems: bool = False
    memory: str = ""
    seconds: int = 0
    count: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    shelf: list[list[dict[str, Any]]] = field(default_factory=list)
    documents: str = ""
    cited: str = ""
    summary: str = ""
    blocks: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    turns: list[Turn] = field(default_factory=list)
    generated: dict[str, Any] | None = None
    grows: bool = False

    def line(self, who: str) -> str:
        """Return a line that nobody else writes."""
        self.count += 1
        return f"{who} says thing number {self.count}."

    def head(self) -> list[Message]:
        """Return the system messages as they are told now."""
        lines = [self.system] if self.system else []
        if self.clock is not None:
            lines.append("".join(self.spelled()))
        text = "\n".join(lines)
        if self.memory:
            text = f"{text}\n<memory_context>\n{self.memory}\n</memory_context>"
        if self.summary:
            text = f"{text}\n[CONVERSATION SUMMARY]\n{self.summary}"
        out: list[Message] = [{"role": "system", "content": text}] if text else []
        if self.two_systems:
            out.append({"role": "system", "content": "A second system message.\nIt has two lines."})
        return out

    def spelled(self) -> tuple[str, str, str]:
        """Return the clock's line in three."""
        assert self.clock is not None
        before, time, after = self.clock
        hour, rest = divmod(self.seconds + 13 * 3600, 3600)
        parts = {"h": hour % 24, "h12": hour % 12 + 1, "m": rest // 60, "s": rest % 60}
        return before, time.format(**parts), after

    def ask(self) -> tuple[Message, ...]:
        """Send the chat as it stands now."""
        self.seconds += 61
        told = self.head() + [dict(message) for message in self.messages]
        if self.documents and self.messages[-1]["role"] == "user" and isinstance(self.messages[-1]["content"], str):
            told[-1] = {"role": "user", "content": self.documents + self.messages[-1]["content"]}
        if self.cited:
            at = max(i for i, message in enumerate(told) if message["role"] == "user")
            told[at] = {"role": "user", "content": self.cited + str(told[at]["content"])}
        sent = self.wire.send(told, stream=True)
        self.turns.append(Turn(told, sent, self.spelled() if self.clock is not None else None, self.grows))
        self.grows = False
        return sent

    def shown(self, generated: dict[str, Any]) -> dict[str, Any]:
        """Return a reply as it is told from the next request on."""
        out: dict[str, Any] = {"role": "assistant", "content": generated["content"].strip()}
        if "tool_calls" in generated:
            out["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _compact(call["function"]["arguments"])}}
                for call in generated["tool_calls"]
            ]
        return out

    def get(self, generated: dict[str, Any]) -> None:
        """A whole answer came."""
        self.wire.answered(generated)
        self.messages.append(self.shown(generated))
        self.generated = generated
        self.grows = True


def _compact(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True)
class Action:
    """One thing that a user does; the numbers choose among what there is."""

    kind: str
    a: int = 0
    b: int = 0
    space: str = ""

    def do(self, client: Client) -> None:
        """Do it; what cannot be done now is left."""
        getattr(self, f"_{self.kind}")(client)

    def _text(self, client: Client) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": self.space + client.line("model") + "\n" + client.line("model") + self.space,
        }

    def _say(self, client: Client) -> None:
        client.messages.append({"role": "user", "content": client.line("user")})
        client.ask()
        client.get(self._text(client))

    def _repeat(self, client: Client) -> None:
        """The same words as before: two equal messages, two equal replies."""
        client.messages.append({"role": "user", "content": "go on"})
        client.ask()
        client.get({"role": "assistant", "content": f"{self.space}ok"})

    def _image(self, client: Client) -> None:
        parts = [{"type": "text", "text": client.line("user")}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
        client.messages.append({"role": "user", "content": parts})
        client.ask()
        client.get(self._text(client))

    def _tools(self, client: Client) -> None:
        client.messages.append({"role": "user", "content": client.line("user")})
        client.ask()
        for _ in range(1 + self.b % 2):
            calls = []
            for i in range(1 + self.a % 3):
                arguments = json.dumps({"city": client.line("call"), "n": i, "é": [1.0, True]})
                function = {"name": "weather", "arguments": arguments}
                calls.append({"id": f"call-{client.count}", "type": "function", "function": function})
            client.get({"role": "assistant", "content": "", "tool_calls": calls})
            for call in calls:
                client.messages.append({"role": "tool", "tool_call_id": call["id"], "content": client.line("tool")})
            client.ask()
        client.get(self._text(client))

    def _cites(self, client: Client) -> None:
        """A citing tool: from its answer on the user message carries a block, in the next turn it does not."""
        client.messages.append({"role": "user", "content": client.line("user")})
        client.ask()
        for _ in range(1 + self.b % 2):
            name = f"call-{client.count}"
            call = {"id": name, "type": "function", "function": {"name": "look_up", "arguments": '{"q": "x"}'}}
            client.get({"role": "assistant", "content": "", "tool_calls": [call]})
            client.messages.append({"role": "tool", "tool_call_id": name, "content": client.line("tool")})
            client.cited = client.cited or f"{LEAD}<source>{client.line('document')}</source>\n</context>\n\n"
            client.blocks |= set(client.cited.split("\n"))
            client.ask()
        client.cited = ""
        client.get(self._text(client))

    def _compact(self, client: Client) -> None:
        """The oldest turns go, a summary of them comes."""
        users = [i for i, message in enumerate(client.messages) if message["role"] == "user"]
        if len(users) > 1:
            del client.messages[: users[1 + self.a % (len(users) - 1)]]
            client.summary = f"{client.line('summary')}\n{client.line('summary')}"
            client.shelf.clear()
            client.grows = False

    def _documents(self, client: Client) -> None:
        block = "".join(f'<source id="{i}">{client.line("document")}</source>\n' for i in range(1 + self.a % 3))
        client.documents = f"{LEAD}{block}</context>\n\n"
        client.blocks |= set(client.documents.split("\n"))
        self._say(client)
        client.documents = ""
        client.grows = False  # whether the block comes back is decided by its size

    def _memory(self, client: Client) -> None:
        client.memory = "" if self.a % 3 == 0 else f"[User Memory]\n- {client.line('memory')}\n- likes tea"

    def _regenerate(self, client: Client) -> None:
        if not client.messages or client.messages[-1]["role"] != "assistant":
            return
        client.shelf.append(list(client.messages))
        client.messages.pop()
        client.grows = False
        if not client.messages or client.messages[-1]["role"] == "assistant":
            client.messages = list(client.shelf[-1])
            return
        client.ask()
        client.get(self._text(client))

    def _arrow(self, client: Client) -> None:
        """Another answer is chosen: the chat as it once was."""
        if client.shelf:
            client.shelf.append(list(client.messages))
            client.messages = list(
                client.shelf[self.a % (len(client.shelf) - 1)] if len(client.shelf) > 1 else client.shelf[0]
            )
            client.grows = False
            told = {line for message in client.messages for line in text_of(message).split("\n")}
            client.gone = {line for line in client.gone if line not in told}

    def _edited(self, client: Client, cut: bool) -> None:
        users = [i for i, m in enumerate(client.messages) if m["role"] == "user" and isinstance(m["content"], str)]
        if not users:
            return
        at = users[self.a % len(users)]
        old = client.messages[at]["content"]
        # Half of the time a first line is put on, then taken off: what a user deletes must stay deleted.
        new = (
            old.partition("\n")[2]
            if "\n" in old
            else f"{client.line('user')}\n{old}"
            if self.b % 2
            else client.line("user")
        )
        client.gone |= {line for line in old.split("\n") if line not in new.split("\n") and line != "go on"}
        client.messages[at] = {"role": "user", "content": new}
        client.grows = False
        if cut:
            del client.messages[at + 1 :]
            client.ask()
            client.get(self._text(client))

    def _edit(self, client: Client) -> None:
        self._edited(client, cut=True)

    def _save(self, client: Client) -> None:
        self._edited(client, cut=False)

    def _stopped(self, client: Client) -> None:
        """The stream was cut; the page holds more or less of it than we saw."""
        client.messages.append({"role": "user", "content": client.line("user")})
        client.ask()
        whole = self._text(client)
        text = whole["content"]
        client.wire.answered({**whole, "content": text[: 3 + self.a % len(text)]}, cut=True)
        shown = text[: 3 + self.b % len(text)]
        if shown.strip():
            client.messages.append({"role": "assistant", "content": shown})
        client.grows = False

    def _failed(self, client: Client) -> None:
        """No answer came: two user messages in a row next."""
        client.messages.append({"role": "user", "content": client.line("user")})
        client.ask()
        client.grows = False

    def _goes_on(self, client: Client) -> None:
        """*Continue*: the request ends in the assistant's words, and the answer is put behind them."""
        if not client.messages or client.messages[-1]["role"] != "assistant" or "tool_calls" in client.messages[-1]:
            return
        client.grows = False
        client.ask()
        more = f" {client.line('model')}{self.space}"
        client.wire.answered({"role": "assistant", "content": more})
        client.messages[-1] = {**client.messages[-1], "content": client.messages[-1]["content"] + more}
        client.grows = False

    def _twice(self, client: Client) -> None:
        """The same model picked twice: two equal requests at once, two answers, one is gone on with."""
        client.messages.append({"role": "user", "content": client.line("user")})
        client.ask()
        first = client.wire.node
        client.ask()
        second, answers = client.wire.node, [self._text(client), self._text(client)]
        client.wire.answered(answers[0], node=first)
        client.wire.answered(answers[1], node=second)
        client.messages.append(client.shown(answers[self.a % 2]))
        client.generated = answers[self.a % 2]
        client.grows = client.clock is None and not client.memory
