"""The recorder, over real sockets and a real folder: what it writes, what never, and that nobody waits for it."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from proxy.config import Config
from proxy.recorder import QUEUED_BYTES, Recorded, Recorder
from tests.bodies import eventually
from tests.conftest import RunningProxy, StartProxy
from tests.fake_vllm import FakeVllm
from tests.test_rewriting import head, send, user

CANARY = "zebedee"


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return what was recorded, oldest first; the writer may take the oldest file away meanwhile."""
    out = []
    for path in sorted(folder.glob("*.jsonl")):
        with suppress(FileNotFoundError):
            out += [json.loads(line) for line in path.read_text().splitlines()]
    return out


async def recorded(proxy: RunningProxy, fake: FakeVllm, folder: Path, **headers: str) -> dict[str, Any]:
    """Send a chat with the canary in it; return its line."""
    before = len(lines(folder))
    await send(proxy, fake, [head(1, f"{CANARY} "), user(f"my name is {CANARY}")], **headers)
    await eventually(lambda: len(lines(folder)) > before)
    return lines(folder)[-1]


async def test_by_default_nothing_is_recorded(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    await send(proxy, fake_vllm, [user("hi")])
    assert proxy.state.recorder is None


async def test_a_line_has_the_request_what_went_up_and_the_figures_but_no_text(
    start_proxy: StartProxy, fake_vllm: FakeVllm, tmp_path: Path
) -> None:
    """Words, ids and keys are in no file; structure is."""
    proxy = await start_proxy(record__dir=str(tmp_path))
    headers = {"X_OpenWebUI_User_Name": CANARY, "X_OpenWebUI_User_Id": CANARY, "X_OpenWebUI_Chat_Id": f"{CANARY}-1"}
    line = await recorded(proxy, fake_vllm, tmp_path, **headers, Authorization=f"Bearer {CANARY}", Cookie=CANARY)
    text = json.dumps(lines(tmp_path), ensure_ascii=False)
    assert CANARY not in text.lower() and "Bearer" not in text
    assert line["n"] == 1 and line["method"] == "POST" and line["path"] == "/v1/chat/completions"
    assert line["t"] <= line["t_first"] <= line["t_end"]
    assert line["usage"]["prompt_tokens"] > 0 and line["usage"]["cached_tokens"] == 0
    assert "move_volatile" in line["trail"] and line["status"] == 200 and line["redacted"]
    received, sent = json.loads(line["body"]), json.loads(line["sent"])
    assert received["messages"][0]["content"] != sent["messages"][0]["content"]
    assert received["messages"][1]["role"] == "user" and received["model"] == "fake"
    names = {name.lower() for name, _ in line["headers"]}
    assert "x-openwebui-chat-id" in names and not names & {"authorization", "cookie", "x-openwebui-user-name"}


async def test_with_redaction_off_the_text_stays_and_keys_still_do_not(
    start_proxy: StartProxy, fake_vllm: FakeVllm, tmp_path: Path
) -> None:
    proxy = await start_proxy(record__dir=str(tmp_path), record__redact=False)
    line = await recorded(proxy, fake_vllm, tmp_path, Authorization="Bearer very-secret", X_Api_Key="very-secret")
    assert json.loads(line["body"])["messages"][1]["content"] == f"my name is {CANARY}"
    assert "very-secret" not in json.dumps(line) and ["X-OpenWebUI-Chat-Id", "c"] in line["headers"]


async def test_files_are_the_owners_alone_and_rotate(
    start_proxy: StartProxy, fake_vllm: FakeVllm, tmp_path: Path
) -> None:
    """A full file is followed by the next; the oldest goes."""
    folder = tmp_path / "made" / "here"
    proxy = await start_proxy(record__dir=str(folder), record__file_bytes=4096, record__files=3)
    for number in range(12):
        await send(proxy, fake_vllm, [user(f"{number} " * 500)])
    await eventually(lambda: bool(lines(folder)) and lines(folder)[-1]["n"] == 12)
    files = sorted(folder.iterdir())
    assert len(files) == 3 and {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_size <= 4096 + 3000 for path in files)


async def test_what_is_queued_at_the_end_is_written(
    start_proxy: StartProxy, fake_vllm: FakeVllm, tmp_path: Path
) -> None:
    proxy = await start_proxy(record__dir=str(tmp_path))
    for _ in range(5):
        await send(proxy, fake_vllm, [user("hi")])
    await proxy.runner.cleanup()
    assert [line["n"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]


async def test_a_folder_that_cannot_be_written_costs_no_answer(
    start_proxy: StartProxy, fake_vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged by the class of its error, and tried again with the next."""
    folder = tmp_path / "file"
    folder.write_text("no folder")
    proxy = await start_proxy(record__dir=str(folder))
    await send(proxy, fake_vllm, [user("hi")])
    await eventually(lambda: "recording_failed" in caplog.text)
    os.unlink(folder)
    await send(proxy, fake_vllm, [user("hi")])
    await eventually(lambda: len(lines(folder)) == 1)


async def test_what_the_disk_cannot_keep_up_with_is_left_out(tmp_path: Path) -> None:
    """The queue is bounded in bytes."""
    recorder = Recorder(Config(), tmp_path, b"secret")
    big = b"x" * (QUEUED_BYTES // 2 + 1)
    for _ in range(3):
        recorder.take(
            Recorded(0.0, "POST", "/", (), big, b"", None, 0.0, 200, "completed", "", (), None)
        )  # fmt: skip
    assert recorder._queue.qsize() == 1 and recorder._left_out == 2
