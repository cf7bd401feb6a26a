"""What the template accepts, asked through /tokenize: once a model, and never in a request's way for long."""

import asyncio
import time
from typing import Any

import pytest

from proxy.core.draft import Template
from proxy.upstream.probe import WAIT_SECONDS
from tests.bodies import chat, eventually
from tests.conftest import RunningProxy, StartProxy
from tests.fake_replies import Hang, Raw, json_error
from tests.fake_vllm import FakeVllm


async def ready(proxy: RunningProxy) -> RunningProxy:
    """Wait until the models are known."""
    await eventually(lambda: proxy.state.models.known())
    return proxy


async def test_a_template_that_renders_a_system_message_in_place_is_known(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """Asked once, whoever asks how often."""
    templates = (await ready(proxy)).state.templates
    found = await asyncio.gather(*(templates.get("fake") for _ in range(5)))
    assert found == [found[0]] * 5 and found[0].system_in_place and found[0].users_in_a_row
    asked = len(fake_vllm.of("/tokenize"))
    await templates.get("fake")
    assert len(fake_vllm.of("/tokenize")) == asked < 10


@pytest.mark.parametrize(
    "answer", [json_error(400, {"error": {"message": "no"}}), json_error(500, {}), Raw([b"<html>"])]
)
async def test_an_unwilling_server_gets_the_form_that_every_template_takes(
    proxy: RunningProxy, fake_vllm: FakeVllm, answer: Any
) -> None:
    """Refusals and odd answers are no knowledge."""
    fake_vllm.answers["/tokenize"] = answer
    assert await (await ready(proxy)).state.templates.get("fake") == Template()


async def test_a_request_waits_a_second_at_most(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """vLLM's renderer may be busy with a book."""
    await ready(proxy)
    fake_vllm.answers["/tokenize"] = Hang()
    began = time.monotonic()
    assert await proxy.state.templates.get("fake") == Template()
    assert WAIT_SECONDS * 0.9 < time.monotonic() - began < WAIT_SECONDS + 1


async def test_names_from_outside_are_not_kept(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A client could fill the memory with them."""
    templates = (await ready(proxy)).state.templates
    for i in range(20):
        await templates.get(f"model-{i}")
        templates.refuse(f"model-{i}")
    assert set(templates._known) == {"fake"} and not templates._refused and not templates._asking


async def test_a_refused_template_is_left_alone_until_vllm_is_found_anew(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """Another model may be served after a restart."""
    proxy = await ready(await start_proxy(models__refresh_seconds=0.05))
    templates = proxy.state.templates
    templates.refuse("fake")
    assert templates.refused("fake") and not templates.refused("other")
    generation = proxy.state.models.generation
    await fake_vllm.stop()
    await eventually(lambda: proxy.state.models.stale)
    await fake_vllm.start()
    await eventually(lambda: proxy.state.models.generation > generation)
    assert not templates.refused("fake")
    async with proxy.post(chat("hi")) as response:
        assert response.status == 200
