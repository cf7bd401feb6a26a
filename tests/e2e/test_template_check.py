"""The check against a real vLLM: its own template, ours in its place, and the same tokens of both."""

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from proxy.chat_template import FileRenderer, bundled, read_template
from proxy.commands import template as command
from proxy.config.groups import Upstream as Settings
from proxy.core.template_cases import Key
from proxy.core.template_check import Refused, Rendering, Traits, asks_of, judge_all, stable
from proxy.demo import server
from proxy.upstream.client import Upstream
from proxy.upstream.rendering import UpstreamRenderer
from tests.e2e.conftest import environment

# Each of the two fixtures starts a vLLM of its own.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ALL = Traits(tools=True, thinking=True, switch=True)
Prompts = Mapping[Key, Rendering | Refused]
StartVllm = Callable[..., server.Child]


@dataclass(frozen=True)
class Served:
    """What a vLLM made of all cases by the template that it serves, and what the command said of it."""

    prompts: Prompts
    code: int
    report: Mapping[str, Any]


async def prompts_of(url: str, template: str | None = None) -> Prompts:
    """Render all cases by the template that is served, or by one that goes with the request."""
    upstream = Upstream(Settings(url=url))

    async def fetch(method: str, path: str, *, body: bytes | None = None, seconds: float, limit_bytes: int) -> Any:
        asked = orjson.loads(body or b"{}") | ({"chat_template": template} if template is not None else {})
        return await upstream.fetch(method, path, body=orjson.dumps(asked), seconds=seconds, limit_bytes=limit_bytes)

    try:
        renderer = UpstreamRenderer(fetch)
        return {key: await renderer.render(ask) for key, ask in asks_of(ALL).items()}
    finally:
        await upstream.close()


def served(url: str, capsys: pytest.CaptureFixture[str]) -> Served:
    """Check a server as a user does, and keep its prompts."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    code = command.run(parser.parse_args(["check", "--json", "--upstream", url]))
    return Served(asyncio.run(prompts_of(url)), code, json.loads(capsys.readouterr().out))


def outcomes(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the outcome of each case that counts, without what the model does not know."""
    return {
        each["case"]: each["outcome"] for each in report["cases"] if each["counted"] and each["outcome"] != "skipped"
    }


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> StartVllm:
    """Describe a vLLM that serves the tiny Qwen2.5 with further flags."""
    made = environment("qwen2tiny")

    def describe(*flags: str) -> server.Child:
        log = tmp_path_factory.mktemp("vllm") / "vllm.log"
        return server.vllm(made, log=log, model="qwen2tiny", flags=("--max-model-len", "4096", *flags))

    return describe


@pytest.fixture(scope="module")
def by_request(start: StartVllm) -> Iterator[str]:
    """A vLLM that serves the model's own template and takes others with a request."""
    with start("--trust-request-chat-template") as child:
        child.wait_ready()
        yield child.url


def test_the_models_own_template_is_stable_and_ours_makes_the_same_tokens(
    by_request: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen2.5's template keeps its prefix, and ours is no other prompt anywhere."""
    own = served(by_request, capsys)
    assert own.code == 0 and set(outcomes(own.report).values()) == {"stable"} and own.report["unit"] == "token"
    ours = asyncio.run(prompts_of(by_request, read_template(bundled()["qwen2.5"])[0]))
    assert all(isinstance(each, Rendering) and each.tokens for each in own.prompts.values())
    assert [key for key in own.prompts if own.prompts[key] != ours[key]] == []


@pytest.mark.parametrize("name", ["llama3.1", "qwen2.5", "qwen3"])
def test_vllm_renders_each_of_our_templates_as_the_check_of_a_file_does(by_request: str, name: str) -> None:
    """So what is proven of a file is proven of the server: messages are prepared alike, names in templates the same."""
    text = read_template(bundled()[name])[0]
    real = asyncio.run(prompts_of(by_request, text))
    file = FileRenderer.of(text, {"bos_token": ""})  # the tiny model has none
    texts = {key: each.text if isinstance(each, Rendering) else each.why for key, each in real.items()}
    made = {key: file.render(ask) for key, ask in asks_of(ALL).items()}
    assert texts == {key: each.text if isinstance(each, Rendering) else each.why for key, each in made.items()}
    traits = Traits(tools=True, thinking=name == "qwen3", switch=name == "qwen3")
    assert stable(judge_all(real, traits))


def test_qwen3s_template_served_by_flag_keeps_thinking(
    start: StartVllm, by_request: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--chat-template`, as the README says it: all cases, those with thinking too, are stable in tokens."""
    wanted = asyncio.run(prompts_of(by_request, read_template(bundled()["qwen3"])[0]))
    with start("--chat-template", str(bundled()["qwen3"])) as child:
        child.wait_ready()
        found = served(child.url, capsys)
    assert found.code == 0 and set(outcomes(found.report).values()) == {"stable"}
    assert {"thinking", "thinking inline", "thinking loop", "thinking off"} <= set(outcomes(found.report))
    assert found.prompts == wanted
