"""Recorded Open WebUI traffic through the proxy, where a folder with recordings and their replayer is given."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import StartProxy

SHARED = Path(os.environ.get("PREFIX_PROXY_TEST_SHARED", "/nowhere"))
REPLAY, CAPTURES = SHARED / "tools" / "replay.py", sorted((SHARED / "captures").glob("*.jsonl"))
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (REPLAY.exists() and CAPTURES), reason="PREFIX_PROXY_TEST_SHARED names no recordings"),
]


@pytest.mark.parametrize("untidy", [False, True], ids=["as told", "untidy replies"])
async def test_recorded_chats_reuse_what_is_cached_and_lose_nothing(
    start_proxy: StartProxy, unused_tcp_port: int, untidy: bool
) -> None:
    """Computed at most 1.08 of what is new, later turns and tasks within their budgets, growth 1.02, no line lost."""
    proxy = await start_proxy(upstream__url=f"http://127.0.0.1:{unused_tcp_port}", models__refresh_seconds=0.2)
    words = [str(REPLAY), "--json", "--listen", str(unused_tcp_port), *(["--untidy"] if untidy else [])]
    run = await asyncio.create_subprocess_exec(
        sys.executable, *words, f"{proxy.url}/v1", *map(str, CAPTURES), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await run.communicate()
    rows = json.loads(out)
    total = {key: sum(row[key] for row in rows) for key in rows[0] if isinstance(rows[0][key], int)}
    assert (total["lost"], total["absent"]) == (0, 0) and not any(row["failures"] for row in rows)
    assert total["chat_computed"] <= 1.08 * total["chat_novel"]
    assert total["turn_computed"] <= 16_500
    assert total["chat_prompt"] <= 1.02 * total["asked"]
    assert total["task_computed"] < 44_000
