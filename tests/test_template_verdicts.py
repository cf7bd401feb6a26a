"""Which of our templates stands in for a model's own: one that makes the same first prompts."""

import asyncio
import datetime

import pytest

from proxy.chat_template import FileRenderer, bundled, read_template
from proxy.core.template_cases import PROBES, Ask
from proxy.core.template_check import Refused, Rendering
from proxy.template_verdicts import check_file, check_upstream, fitting, fitting_file
from tests.toy_templates import STEADY

BOS = {"bos_token": "<|begin_of_text|>"}


@pytest.mark.parametrize("name", ["llama3.1", "qwen2.5", "qwen3"])
def test_a_template_that_differs_in_history_only_is_mended_by_ours(name: str) -> None:
    """Its first prompts are ours to the letter: the model knows the form."""
    text = read_template(bundled()[name])[0]
    tokens = BOS if name == "llama3.1" else {}
    assert fitting_file(text, tokens) == bundled()[name]
    assert fitting_file(text.replace("assistant", "helper"), tokens) is None


def test_a_clock_in_the_template_does_not_hide_which_of_ours_fits() -> None:
    """Llama 3.2's own has one; a running server shows today's date."""
    text = read_template(bundled()["llama3.1"])[0]
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert "26 Jul 2024" in text
    dated = FileRenderer.of(text.replace("26 Jul 2024", today), BOS)
    assert fitting({name: dated.render(ask) for name, ask in PROBES.items()}) == bundled()["llama3.1"]


def test_a_form_that_none_of_ours_has_is_left_alone() -> None:
    assert fitting_file(STEADY, {}) is None
    assert fitting_file("{{ raise_exception('no') }}", {}) is None


def test_a_server_and_a_file_are_judged_alike() -> None:
    """The same cases with the same outcomes, where the server has no clock in its prompts."""
    text = read_template(bundled()["qwen3"])[0]
    renderer = FileRenderer.of(text, {})

    async def render(ask: Ask) -> Rendering | Refused:
        return renderer.render(ask)

    served, file = asyncio.run(check_upstream(render)), check_file(text, {})
    outcomes = [[(each.case, each.outcome) for each in found.verdicts] for found in (served, file)]
    assert outcomes[0] == outcomes[1]
