"""Step `spell_arguments`: tool arguments that are no text are written as the JSON text that the API asks for."""

from collections.abc import Mapping
from dataclasses import replace

from proxy.core.draft import Draft, Entry, Facts
from proxy.core.text import calls_of, packed


def spell_arguments(draft: Draft, facts: Facts) -> Draft:
    """Write arguments given as an object as compact JSON text in their own key order, empty or null ones as `{}`.

    Templates iterate over what the text says, and vLLM refuses or breaks on anything else.  A text stays as it is,
    broken JSON too: it is what the model wrote, and nobody may replace it in silence.
    """
    entries = tuple(_spelled(entry) for entry in draft.entries)
    if all(a is b for a, b in zip(entries, draft.entries, strict=True)):
        return draft
    return replace(draft, entries=entries)


def _spelled(entry: Entry) -> Entry:
    calls = entry.message.get("tool_calls") if entry.role == "assistant" else None
    if not isinstance(calls, list) or all(_is_text(call) for call in calls_of(entry.message)):
        return entry
    return entry._replace(message={**entry.message, "tool_calls": [_call(call) for call in calls]}, node=None)


def _is_text(call: Mapping[str, object]) -> bool:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return True
    arguments = function["arguments"]
    return not (arguments is None or arguments == "" or isinstance(arguments, dict))


def _call(call: object) -> object:
    if not isinstance(call, dict) or _is_text(call):
        return call
    arguments = call["function"]["arguments"]
    text = packed(arguments).decode() if arguments else "{}"
    return {**call, "function": {**call["function"], "arguments": text}}
