"""What the template check says of a file and of a running vLLM, and which of the project's own templates would do."""

import datetime
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.chat_template import LATER, Encode, FileRenderer, bundled, read_template
from proxy.core.template_cases import PROBES, Ask
from proxy.core.template_check import (
    Refused,
    Rendering,
    Traits,
    Verdict,
    asks_of,
    judge_all,
    judge_clock,
    judge_date,
    traits_of,
)

_DATES = ("%Y-%m-%d", "%d %b %Y", "%d %B %Y", "%B %d, %Y", "%b %d, %Y", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")
# The date that Llama's templates have where no clock gives another.
_LLAMA_DAY = datetime.datetime(2024, 7, 26)
_LLAMA_BOS = "<|begin_of_text|>"
_FIRST_PROMPTS = ("bare", "tools", "on", "off")

Probed = Mapping[str, Rendering | Refused]
"""The renderings of PROBES, by name."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The verdicts, what the template knows, and how it renders the probes."""

    verdicts: Sequence[Verdict]
    traits: Traits
    probed: Probed


def check_file(text: str, tokens: Mapping[str, str], encode: Encode | None = None) -> Checked:
    """Check a template's text, with the special tokens that it may name.  Raises TemplateFailed."""
    now = FileRenderer.of(text, tokens, encode=encode)
    later = FileRenderer.of(text, tokens, clock=LATER, encode=encode)
    probed = {name: now.render(ask) for name, ask in PROBES.items()}
    traits = traits_of(probed)
    asks = asks_of(traits)
    rendered = {key: now.render(ask) for key, ask in asks.items()}
    clock = judge_clock(rendered, {key: later.render(ask) for key, ask in asks.items()})
    return Checked([*judge_all(rendered, traits), clock], traits, probed)


async def check_upstream(render: Callable[[Ask], Awaitable[Rendering | Refused]]) -> Checked:
    """Check what a running vLLM renders; its clock is its own, so today's date is looked for.  Raises NoAnswer."""
    probed = {name: await render(ask) for name, ask in PROBES.items()}
    traits = traits_of(probed)
    asks = asks_of(traits)
    rendered = {key: await render(ask) for key, ask in asks.items()}
    today = datetime.datetime.now()
    prompts = [(rendered[key], ask.messages) for key, ask in asks.items()]
    date = judge_date(prompts, tuple(today.strftime(form) for form in _DATES))
    return Checked([*judge_all(rendered, traits), date], traits, probed)


def fitting_file(text: str, tokens: Mapping[str, str]) -> Path | None:
    """Return the template of ours that makes the same first prompts as this one, None if there is none."""
    own = FileRenderer.of(text, tokens, clock=_LLAMA_DAY)
    return fitting({name: own.render(ask) for name, ask in PROBES.items()})


def fitting(probed: Probed) -> Path | None:
    """Return the template of ours that makes the same first prompts but for the date: then the model knows its form."""
    today = datetime.datetime.now().strftime("%d %b %Y")
    own = [_text(probed[name]).replace(today, _LLAMA_DAY.strftime("%d %b %Y")) for name in _FIRST_PROMPTS]
    if not all(own):
        return None
    tokens = {"bos_token": _LLAMA_BOS if own[0].startswith(_LLAMA_BOS) else ""}
    for path in bundled().values():
        ours = FileRenderer.of(read_template(path)[0], tokens)
        if own == [_text(ours.render(PROBES[name])) for name in _FIRST_PROMPTS]:
            return path
    return None


def _text(rendering: Rendering | Refused) -> str:
    return rendering.text if isinstance(rendering, Rendering) else ""
