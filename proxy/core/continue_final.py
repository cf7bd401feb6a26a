"""Step `continue_final`: a request that ends in the assistant's words is answered by going on with them."""

from dataclasses import replace

from proxy.core.draft import Draft, Facts
from proxy.core.text import calls_of

_CONSTRAINED = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def continue_final(draft: Draft, facts: Facts) -> Draft:
    """Set vLLM's `continue_final_message` and clear `add_generation_prompt` where the last message is the assistant's.

    Open WebUI's *Continue* sends no flag, so vLLM would begin a new turn; the reply is appended to what the page
    shows, so the message itself is never changed.  Not with tool calls, list or empty content, constrained output, a
    model that reasons, or when the client set either flag (vLLM 0.32 refuses both at true).
    """
    if not draft.entries or facts.reasons:
        return draft
    last = draft.entries[-1].message
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str) or not content.strip() or calls_of(last):
        return draft
    if last.get("tool_calls") or any(draft.rest.get(field) is not None for field in _CONSTRAINED):
        return draft
    if "continue_final_message" in draft.rest or "add_generation_prompt" in draft.rest:
        return draft
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    return replace(draft, rest={**draft.rest, **flags})
