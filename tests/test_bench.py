"""`prefix-proxy bench`, run as a user runs it, against the fake vLLM."""

import asyncio
import json
from typing import Any

import pytest

from proxy.commands import main
from tests.conftest import RunningProxy, StartProxy, StartVllm
from tests.fake_engine import Rules
from tests.fake_replies import Hang
from tests.fake_vllm import FakeVllm

Capture = pytest.CaptureFixture[str]


async def bench(fake: FakeVllm, proxy: RunningProxy, *words: str) -> int:
    """Run the command in a thread: it has a loop of its own, as it has for a user."""
    line = ["bench", "--upstream", fake.url, "--proxy", f"{proxy.url}/v1", "--size", "small", *words]
    return await asyncio.to_thread(main, line)


async def test_all_scenarios_are_played_and_the_proxy_computes_less(
    proxy: RunningProxy, fake_vllm: FakeVllm, capsys: Capture
) -> None:
    """Every scenario on both ways, equally many requests, none failed."""
    assert await bench(fake_vllm, proxy, "--users", "2", "--turns", "3", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["problems"]) == ("fake", [])
    found: dict[str, Any] = {each["scenario"]: each for each in told["scenarios"]}
    assert list(found) == ["clock", "document", "memory", "tools", "tasks", "long", "knowledge-base"]
    assert all(each["straight"]["requests"] == each["proxied"]["requests"] > 0 for each in found.values())
    assert all(each[way]["failed"] == 0 for each in found.values() for way in ("straight", "proxied"))
    for name in ("clock", "document", "memory", "tools", "long"):
        assert found[name]["ratio"]["computed_tokens"] > 1.15, name
    assert found["clock"]["proxied"]["cached_share"] > 0.6 > 0.2 > found["clock"]["straight"]["cached_share"]


async def test_for_programs_there_are_tabs_and_for_people_progress(
    proxy: RunningProxy, fake_vllm: FakeVllm, capsys: Capture
) -> None:
    """The table on stdout, the progress on stderr."""
    assert await bench(fake_vllm, proxy, "--scenario", "clock", "--users", "1", "--turns", "2") == 0
    told = capsys.readouterr()
    lines = [line.split("\t") for line in told.out.splitlines()]
    assert {len(line) for line in lines} == {9} and [line[1] for line in lines] == [
        "way",
        "straight",
        "proxied",
        "ratio",
    ]
    assert "clock: 1 users, 2 turns, two ways" in told.err


async def test_what_vllm_refuses_is_told_and_the_rest_is_played(
    start_vllm: StartVllm, start_proxy: StartProxy, capsys: Capture
) -> None:
    """Without a tool parser vLLM refuses tools: exit code 1, the reason, and the figures of the others."""
    fake = await start_vllm(rules=Rules(tool_parser=False))
    proxy = await start_proxy(upstream__url=fake.url)
    assert await bench(fake, proxy, "--scenario", "tools,clock", "--users", "1", "--turns", "2", "--json") == 1
    told = capsys.readouterr()
    assert "--enable-auto-tool-choice" in told.err
    assert [each["scenario"] for each in json.loads(told.out)["scenarios"]] == ["tools", "clock"]


async def test_a_key_is_used_and_its_lack_is_told(
    fake_vllm: FakeVllm, proxy: RunningProxy, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own key comes from the environment."""
    fake_vllm.api_key = "sk-upstream"
    assert await bench(fake_vllm, proxy, "--scenario", "clock") == 2
    assert "PREFIX_PROXY_UPSTREAM_API_KEY" in capsys.readouterr().err


async def test_it_stops_when_the_time_is_up_and_shows_what_it_has(
    fake_vllm: FakeVllm, proxy: RunningProxy, capsys: Capture
) -> None:
    """A vLLM that falls silent does not hold it."""
    fake_vllm.reply_to = lambda body: Hang()
    assert await bench(fake_vllm, proxy, "--scenario", "clock", "--max-seconds", "1") == 1
    assert "The time was up after 1 seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--scenario", "clock,nothing"), "knowledge-base"),
        (("--scenario", ","), "knowledge-base"),
        (("--users", "500"), "--max-requests"),
    ],
)
async def test_what_cannot_be_ends_with_2_before_anything_is_sent(
    fake_vllm: FakeVllm, proxy: RunningProxy, words: tuple[str, ...], told: str, capsys: Capture
) -> None:
    assert await bench(fake_vllm, proxy, *words) == 2
    assert told in capsys.readouterr().err
    assert fake_vllm.generations == []


@pytest.mark.parametrize(
    ("upstream", "proxy", "told"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9/v1", "the same address"),
        ("127.0.0.1:8000", "http://127.0.0.1:9", "must be URLs"),
        ("http://127.0.0.1:9", "http://127.0.0.1:10", "Nothing answers at http://127.0.0.1:9:"),
    ],
)
def test_addresses_of_no_use_end_with_2_and_a_sentence(upstream: str, proxy: str, told: str, capsys: Capture) -> None:
    assert main(["bench", "--upstream", upstream, "--proxy", proxy]) == 2
    caught = capsys.readouterr()
    assert told in caught.err and "Traceback" not in caught.err and not caught.out


def test_the_help_has_scenarios_examples_and_exit_codes(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert "knowledge-base" in out and "examples:" in out and "exit codes:" in out
