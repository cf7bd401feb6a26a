"""`prefix-proxy explain`: recordings of conversations whose breaks are known, as a table and as JSON."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.commands import main
from tests.conftest import StartProxy
from tests.fake_vllm import FakeVllm
from tests.test_rewriting import head, model, send, user

RULE = "Answer in one sentence. " * 20


def record(path: Path, *requests: list[dict[str, Any]], **fields: Any) -> Path:
    """Write requests as a recorder does; return the file."""
    chat = fields.pop("chat", None)
    headers = [["X-OpenWebUI-User-Id", "u"]] + ([["X-OpenWebUI-Chat-Id", chat]] if chat else [])
    lines = []
    for n, messages in enumerate(requests, 1):
        body = json.dumps({"model": "m", "messages": messages, "stream": True, **fields})
        line = {
            "n": n,
            "t": n * 10.0,
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": headers,
            "body": body,
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path


def files(folder: Path) -> list[Path]:
    """Return what was recorded into a folder."""
    return sorted(folder.glob("*.jsonl"))


def explained(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> dict[str, Any]:
    """Return what the command prints as JSON."""
    assert main(["explain", str(path), "--json", *words]) == 0
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


CLOCK = [
    [head(1), user("hi")],
    [head(9), user("hi"), model("hello"), user("again")],
]
MEMORY = [
    [{"role": "system", "content": "Base rules.\n<memory_context>\n- likes tea\n</memory_context>"}, user("a")],
    [
        {"role": "system", "content": "Base rules.\n<memory_context>\n- likes tea\n- has a cat\n</memory_context>"},
        user("a"),
        model("b"),
        user("c"),
    ],
]


@pytest.mark.parametrize("chat", [None, "c"])
@pytest.mark.parametrize(("requests", "character"), [(CLOCK, 33), (MEMORY, 41)])
def test_a_break_in_the_system_message_is_found_and_mended(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, requests: Any, character: int, chat: str | None
) -> None:
    """PC-01 and PC-05: message 0, the very character; after the rewriting there is none."""
    found = explained(capsys, record(tmp_path / "a.jsonl", *requests, chat=chat))["requests"]
    assert found[0]["received"]["cause"] is None and not found[0]["received"]["compared"]
    received = found[1]["received"]
    assert (received["break_at_message"], received["char_offset"], received["cause"]) == (0, character, "system")
    assert "move_volatile" in found[1]["trail"]
    if chat is not None or requests is CLOCK:  # a chat found by content gets no memory back
        assert found[1]["rewritten"]["cause"] is None and found[1]["rewritten"]["shared_messages"] >= 2


def test_off_explains_the_requests_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = explained(capsys, record(tmp_path / "a.jsonl", *CLOCK), "--profile", "off")["requests"]
    assert [row["rewritten"] for row in found] == [None, None]


def test_a_chat_that_only_grows_has_no_break(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = [{"role": "system", "content": RULE}, user("one"), model("first " * 40), user("two")]
    found = explained(capsys, record(tmp_path / "a.jsonl", told[:2], told, chat="c"), "--block", "4")
    assert found["block_tokens"] == 4 and found["totals"]["received_breaks"] == 0
    assert 170 <= found["requests"][1]["received"]["shared_tokens"] <= found["requests"][1]["received"]["prompt_tokens"]


def test_a_task_is_named_and_compared_with_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """PC-14: nor is the chat compared with the task."""
    task = [user("### Task:\nGenerate a concise, 3-5 word title\n<chat_history>\nUSER: a\n</chat_history>")]
    told = [user("one"), model("first"), user("two")]
    path = record(tmp_path / "a.jsonl", told[:1], task, told, chat="c", stream=False)
    found = explained(capsys, path)["requests"]
    assert [row["task"] for row in found] == [None, "title_generation", None]
    assert found[1]["received"]["shared_messages"] is None
    assert (found[2]["received"]["cause"], found[2]["received"]["shared_messages"]) == (None, 2)


def test_another_model_and_a_long_pause_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = [user("one"), model("first"), user("two")]
    path = record(tmp_path / "a.jsonl", told[:1], told, chat="c")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["t"] += 2000.0
    path.write_text("\n".join(map(json.dumps, rows)))
    assert explained(capsys, path)["requests"][1]["received"]["cause"] == "expired"
    rows[1]["t"], rows[1]["body"] = 20.0, rows[1]["body"].replace('"m"', '"other"')
    path.write_text("\n".join(map(json.dumps, rows)))
    assert explained(capsys, path)["requests"][1]["received"]["cause"] == "model"


def test_what_is_no_recording_is_said_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A file that is not there, one with nothing in it, lines of something else."""
    assert main(["explain", str(tmp_path / "none.jsonl")]) == 2
    assert main(["explain", str(tmp_path / "none.jsonl"), "--block", "0"]) == 2
    path = tmp_path / "odd.jsonl"
    path.write_text('no json\n{"a": 1}\n[]\n\n{"path": "/v1/models", "method": "GET"}\n')
    assert main(["explain", str(path)]) == 1
    assert "3 lines could not be read" in capsys.readouterr().out


def test_the_table_is_plain_where_nobody_looks_and_holds_no_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["explain", str(record(tmp_path / "a.jsonl", *CLOCK))]) == 0
    out = capsys.readouterr().out
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[0][:4] == ["n", "chat", "turn", "prompt"] and rows[2][5:7] == ["0:33", "system"]
    assert "characters / 4" in out and "hello" not in out and "brief" not in out


@pytest.mark.parametrize("redact", [True, False])
async def test_a_recording_of_the_proxy_is_explained_as_it_happened(
    start_proxy: StartProxy, fake_vllm: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str], redact: bool
) -> None:
    """Redacted as well as not: the break is where it was, the steps see what they saw."""
    proxy = await start_proxy(record__dir=str(tmp_path), record__redact=redact)
    await send(proxy, fake_vllm, CLOCK[0])
    await send(proxy, fake_vllm, CLOCK[1])
    await proxy.runner.cleanup()
    (path,) = files(tmp_path)
    found = (await asyncio.to_thread(explained, capsys, path))["requests"]
    assert (found[1]["received"]["cause"], found[1]["received"]["break_at_message"]) == ("system", 0)
    assert 32 <= found[1]["received"]["char_offset"] <= 33
    assert found[1]["rewritten"]["cause"] is None and found[1]["real"]["prompt_tokens"] > 0
