"""A person in a real browser, a real Open WebUI, the proxy, a real vLLM: nothing breaks, and prompts are reused.

The model's weights are random; only words that it may choose from are given to it, so that answers can be read.
"""

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.demo import server
from proxy.demo.needs import Missing
from tests.e2e import browser, openwebui
from tests.e2e.conftest import Gauges, cache_folder, until
from tests.e2e.person import ANSWERS, Person, labelled, saying

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),  # the first test may also make the environments
    pytest.mark.parametrize("vllm", ["qwen2tiny"], indirect=True, scope="session"),
]

LEAST_TURN_SHARE = 0.95
"""Of a later turn's prompt, cached; 0.98 to 0.99 were measured: all but the new turn and the last answer."""
LEAST_SHARE = 0.8
"""Of all prompts of later turns with their follow-up tasks, cached, as the metrics tell it; about 0.9 measured."""

WORDS = " harbour gate crane ship pilot tide rope anchor sail wind river bridge stone light boat water north south"
TALE_TOKENS = 150
END_OF_TURN = 151645  # Qwen2.5's <|im_end|>
FILE = "\n\n".join(
    f"Chapter {n}. Quay {n} was dredged in 19{n} and took {7 * n} ships a year. Its cranes lift {n} tons, and its gate "
    f"opens with the tide. A pilot comes on board two miles before the mole; master {n} keeps the book of the quay."
    for n in range(10, 60)
)
CLOCK = "You are the help desk of a harbour. The time now is {{CURRENT_DATETIME}}.\nYou answer in one sentence."


@dataclass
class Stack:
    """Everything that runs: the addresses of vLLM, the proxy, Open WebUI and the browser's DevTools."""

    vllm: str
    proxy: str
    open_webui: str
    devtools: str
    pictures: Path


@pytest.fixture(scope="module")
def stack(vllm: server.Child, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A proxy, an Open WebUI and a browser, started once; pictures go to $PREFIX_PROXY_TEST_ARTIFACTS if it is set."""
    program = browser.installed()
    if program is None:
        pytest.skip("There is no Chromium here: apt-get install chromium.")
    folder = tmp_path_factory.mktemp("openwebui")
    pictures = Path(os.environ.get("PREFIX_PROXY_TEST_ARTIFACTS") or folder / "pictures")
    pictures.mkdir(parents=True, exist_ok=True)
    try:
        python = openwebui.ensure(cache_folder())
    except Missing as error:
        pytest.fail(str(error), pytrace=False)
    with ExitStack() as running:
        proxy = running.enter_context(server.proxy(vllm.url, log=folder / "proxy.log"))
        embeddings = running.enter_context(openwebui.embeddings())
        page = running.enter_context(openwebui.open_webui(python, proxy.url, embeddings, folder))
        devtools = running.enter_context(browser.chromium(program, folder / "chromium"))
        for child in (proxy, page):
            child.wait_ready()
        yield Stack(vllm.url, proxy.url, page.url, devtools, pictures)


@pytest.fixture
async def person(stack: Stack, request: pytest.FixtureRequest) -> AsyncIterator[Person]:
    """A person before the page, signed in, with models whose answers are words; an error toast fails the test."""
    async with aiohttp.ClientSession() as session, browser.open_page(session, stack.devtools) as page:
        someone = Person(page, session, stack.open_webui, stack.proxy, stack.pictures)
        try:
            await someone.enter()
            await someone.add_models(await models(session, stack.vllm), "qwen2tiny")
            yield someone
            await someone.saw_no_error()
        finally:
            await someone.picture(f"end-of-{request.node.originalname}")


async def models(session: aiohttp.ClientSession, vllm: str) -> dict[str, dict[str, Any]]:
    """Return the parameters of our models: one that answers briefly and knows the time, one that tells long tales."""
    asked = {"model": "qwen2tiny", "prompt": WORDS, "add_special_tokens": False}
    async with session.post(f"{vllm}/tokenize", json=asked) as response:
        allowed = (await response.json())["tokens"]
    assert len(allowed) == len(WORDS.split()), "a word of several tokens would not be read again as it was written"
    brief = {"allowed_token_ids": json.dumps([*allowed, END_OF_TURN]), "min_tokens": "8"}
    long = {"allowed_token_ids": json.dumps([*allowed, END_OF_TURN]), "min_tokens": str(TALE_TOKENS)}
    return {
        "brief": {"max_tokens": 24, "custom_params": brief, "system": CLOCK},
        "tales": {"max_tokens": TALE_TOKENS, "custom_params": long},
    }


@dataclass
class Counted:
    """Prompt tokens and how many of them were cached, as the proxy and as vLLM count them."""

    proxy: Gauges
    vllm: Gauges

    async def read(self) -> tuple[float, ...]:
        """Return prompt and cached tokens of the proxy, then of vLLM, so far."""
        names = ("proxy_prompt_tokens_total", "proxy_cached_tokens_total")
        own = [await self.proxy.read(name) for name in names]
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        return (*own, *[await self.vllm.read(name) for name in names])

    async def shares_since(self, before: tuple[float, ...]) -> tuple[float, float]:
        """Return the cached share since `before`, by the proxy and by vLLM."""
        prompt, cached, queries, hits = (now - then for now, then in zip(await self.read(), before, strict=True))
        return cached / prompt, hits / queries


@pytest.fixture
def counted(person: Person, stack: Stack) -> Counted:
    """The two counts of tokens."""
    return Counted(Gauges(person.session, stack.proxy), Gauges(person.session, stack.vllm))


def share(answer: dict[str, Any]) -> float:
    """Return the cached share of an answer's prompt, from the usage that Open WebUI keeps with it."""
    usage = answer["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] or 0) / float(usage["prompt_tokens"])


async def test_three_turns_reuse_the_prompt_while_the_clock_moves(person: Person, counted: Counted) -> None:
    """
    The time in the system prompt changes each turn; turns 2 and 3 come from the cache all the same, and all is kept.
    """
    await person.begin("brief")
    answers = [await person.ask("Which quay has the oldest gate?")]
    await person.picture("three-turns-1")
    before = await counted.read()
    for number, question in enumerate(("How many ships came to quay 21?", "Who led it?"), start=2):
        answers.append(await person.ask(question))
        await person.picture(f"three-turns-{number}")
    by_proxy, by_vllm = await counted.shares_since(before)
    print([round(share(answer), 3) for answer in answers], round(by_proxy, 3), round(by_vllm, 3))
    assert [share(answer) for answer in answers[1:] if share(answer) < LEAST_TURN_SHARE] == []
    assert min(by_proxy, by_vllm) >= LEAST_SHARE
    assert await person.title() not in ("", "New Chat")
    await person.page.go(f"{person.url}/c/{await person.chat()}")
    await person.page.until(f"{ANSWERS}.length === 3")
    await person.sees(answers[-1]["content"])


async def test_an_attached_file_is_computed_once(person: Person, counted: Counted, tmp_path: Path) -> None:
    """
    Each turn tells the file's parts again, in another place; the second and third take them from the cache.
    """
    file = tmp_path / "handbook.txt"
    file.write_text(FILE)
    await person.begin("brief")
    await person.attach(file)
    await person.picture("file-attached")
    answers = [await person.ask("What does chapter 21 say?")]
    before = await counted.read()
    answers += [await person.ask("And chapter 40?"), await person.ask("Who keeps the book of quay 12?")]
    by_proxy, by_vllm = await counted.shares_since(before)
    await person.picture("file-answered")
    print([round(share(answer), 3) for answer in answers], round(by_proxy, 3), round(by_vllm, 3))
    assert all(answer["sources"] for answer in answers), "Open WebUI read nothing in the file"
    assert [share(answer) for answer in answers[1:] if share(answer) < LEAST_TURN_SHARE] == []
    assert min(by_proxy, by_vllm) >= LEAST_SHARE


async def test_an_answer_is_made_again_and_a_question_is_edited(person: Person, counted: Counted) -> None:
    """
    Both answers stay to be leafed through; the edited question gets an answer of its own, the old branch stays.
    """
    await person.begin("brief")
    first = await person.ask("Which quay has the oldest gate?")
    second = await person.ask("How many ships came to quay 21?")
    await person.page.click(labelled("Regenerate"))
    await person.page.click(saying("Try Again"))
    again = await person.answered(5)
    await person.picture("regenerated")
    assert await person.page.value("document.body.innerText.includes('2/2')")
    await person.page.click(
        "[...document.querySelectorAll('.user-message button')].filter(b => b.ariaLabel === 'Edit').at(-1)"
    )
    area = "document.querySelector('.user-message textarea')"
    await person.page.until(f"({area}.select(), true)")
    await person.page.type(area, "How many boats came to quay 33?")
    await person.picture("editing")
    await person.page.click("document.getElementById('confirm-edit-message-button')")
    edited = await person.answered(7)
    await person.picture("edited")
    last = await person.ask("And to quay 34?")
    await person.picture("after-the-edit")
    kept = {message["id"]: message for message in await person.kept()}
    print([round(share(answer), 3) for answer in (first, second, again, edited, last)])
    assert [kept[answer["id"]]["content"] for answer in (first, second, again)] == [
        answer["content"] for answer in (first, second, again)
    ]
    assert kept[edited["parentId"]]["content"] == "How many boats came to quay 33?"
    assert kept[edited["parentId"]]["parentId"] == first["id"]
    assert [share(answer) for answer in (second, again, edited, last) if share(answer) < LEAST_TURN_SHARE] == []


async def test_an_answer_is_stopped_and_continued(person: Person, counted: Counted) -> None:
    """
    Stop frees vLLM and keeps the text; Continue goes on where it ended, in the same answer; the next turn reuses it.
    """
    await person.begin("tales")
    await person.say("Tell a long tale.")
    await person.page.until(f"{ANSWERS}.at(-1).innerText.length > 100")
    await person.picture("before-the-stop")
    aborts = await counted.proxy.read("proxy_aborts_total")
    await person.page.click(labelled("Stop"))
    await until(lambda: counted.proxy.read("proxy_aborts_total"), aborts + 1, seconds=5)
    await person.page.until(labelled("Continue Response"))
    await person.quiet()
    await person.picture("stopped")
    stopped = (await person.kept())[-1]["content"]
    await person.sees(stopped)
    await person.page.click(labelled("Continue Response"))
    await person.page.until(f"{ANSWERS}.at(-1).innerText.length > {len(stopped) + 100}")
    whole = await person.answered(2)
    await person.picture("continued")
    last = await person.ask("And then?")
    await person.picture("after-continue")
    print(len(stopped), len(whole["content"]), round(share(whole), 3), round(share(last), 3))
    assert len(stopped.split()) < TALE_TOKENS, "it ended before it could be stopped"
    assert whole["content"].startswith(stopped)
    assert len(whole["content"].split()) > TALE_TOKENS
    assert await counted.proxy.read('proxy_trail_steps_total{step="continue_final"}') >= 1
    assert [share(answer) for answer in (whole, last) if share(answer) < LEAST_TURN_SHARE] == []
