"""Small chat templates: one that keeps every prefix, and for each known fault one that has it and nothing else."""

from collections.abc import Mapping

from proxy.core.template_cause import Cause

_SHAPE = (
    "HEAD{% for m in messages %}<{{ m.role }}>THINK{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} ARGUMENTS]{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>OPEN{% endif %}"
)
_TOOLS = "{{ tools | tojson if tools else '' }}"
_THOUGHT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
_EMPTY = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


def toy(
    head: str = _TOOLS,
    think: str = "{% if m.reasoning_content %}" + _THOUGHT + "{% endif %}",
    arguments: str = "{{ c.function.arguments | tojson }}",
    opened: str = "",
    shape: str = _SHAPE,
) -> str:
    """Return a template's text."""
    text = shape.replace("HEAD", head).replace("THINK", think)
    return text.replace("ARGUMENTS", arguments).replace("OPEN", opened)


STEADY = toy()
TRIMS = _SHAPE.replace("{{ m.content }}", "{{ m.content | trim }}")
GATHERS = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}" + _TOOLS
DROPS_LATER_SYSTEM = _SHAPE.replace("<{{", "{% if m.role != 'system' or loop.first %}<{{").replace(
    "<end>", "<end>{% endif %}"
)
TOOLS_LAST = _SHAPE.replace("<{{ m.role }}>", "{% if loop.last %}" + _TOOLS + "{% endif %}<{{ m.role }}>")
FIRST_ONLY = "{% if messages | length == 1 and messages[0].role != 'system' %}You help.{% endif %}"

# Fault, the case that shows it first, the turn after which it shows, what is lost there, what stands there instead.
FAULTS: Mapping[str, tuple[str, Cause, str, int, str, str]] = {
    "thinking only in the last message": (
        toy(think="{% if m.reasoning_content and loop.last %}" + _THOUGHT + "{% endif %}"),
        Cause.THINKING_REMOVED, "thinking", 1, "<think>\nThe user", "Lake Baikal",
    ),
    "thinking cut out of the content": (
        toy(shape=_SHAPE.replace("m.content }}", "m.content.split('</think>')[-1] | trim }}")),
        Cause.THINKING_REMOVED, "thinking inline", 1, "<think>\nThe user", "Lake Baikal",
    ),
    "thinking of a loop until the next question": (
        toy(think="{% if m.reasoning_content and messages[-1].role != 'user' %}" + _THOUGHT + "{% endif %}"),
        Cause.THINKING_REMOVED, "thinking loop", 3, "<think>\nAsk for", "[look_up_weather",
    ),
    "an opened think block that history lacks": (
        toy(opened="<think>\n", think=""),
        Cause.THINKING_REMOVED, "plain", 1, "<think>\n", "Lake Baikal",
    ),
    "a date": (
        toy(head="It is {{ strftime_now('%d %b %Y') }}."), Cause.DATE, "clock", 1, "3 Feb 2026", "4 Mar 2027",
    ),
    "a time": (
        toy(head="{{ strftime_now('%H:%M:%S') }}"), Cause.DATE, "clock", 1, "4:05:06", "5:06:07",
    ),
    "a default text in the first turn alone": (
        toy(head=FIRST_ONLY), Cause.DEFAULT_SYSTEM, "plain", 1, "You help.", "<user>",
    ),
    "a default text that a later system message ends": (
        toy(head="{% if not messages | selectattr('role', 'equalto', 'system') | list %}You help.{% endif %}"),
        Cause.DEFAULT_SYSTEM, "system later", 1, "You help.", "<user>",
    ),
    "arguments indented": (
        toy(arguments="{{ c.function.arguments | tojson(indent=2) }}"),
        Cause.ARGUMENTS, "tool loop", 1, '"town": "Zürich"', '\n  "town"',
    ),
    "arguments sorted": (
        toy(arguments="{{ c.function.arguments | tojson(sort_keys=true) }}"),
        Cause.ARGUMENTS, "tool loop", 1, 'town": "Zürich"', 'days": 2',
    ),
    "arguments in ASCII": (
        toy(arguments="{{ c.function.arguments | tojson(ensure_ascii=true) }}"),
        Cause.ARGUMENTS, "tool loop", 1, 'ürich"', "\\u00fcrich",
    ),
    "arguments as Python writes them": (
        toy(arguments="{{ c.function.arguments }}"), Cause.ARGUMENTS, "tool loop", 1, '"town": "Z', "'town': 'Z",
    ),
    "arguments as a text in JSON": (
        toy(arguments="{{ c.function.arguments | tojson | tojson(ensure_ascii=false) }}"),
        Cause.ARGUMENTS, "tool loop", 1, '{"town": "Z', '"{\\"town\\": ',
    ),
    "an empty think block that history lacks": (
        toy(opened=_EMPTY), Cause.EMPTY_THINK, "thinking off", 1, "<think>\n\n</think>", "Lake Baikal",
    ),
    "an empty think block that only history has": (
        toy(think="{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"),
        Cause.EMPTY_THINK, "continue", 1, "Lake Baikal", "<think>\n\n</think>",
    ),
    "tools before the last message": (
        toy(head="", shape=TOOLS_LAST), Cause.TOOLS, "tools", 1, '[{"type"', "<user>Which lake",
    ),
    "system messages gathered in front": (
        toy(head=GATHERS, shape=_SHAPE.replace("in messages %}<", "in messages if m.role != 'system' %}<")),
        Cause.SYSTEM_MOVED, "system later", 1, "<user>", "The user has moved",
    ),
    "replies trimmed": (
        toy(shape=TRIMS), Cause.TRIMMED, "white space", 1, " \n", "<end>",
    ),
    "a later system message left out": (
        toy(shape=DROPS_LATER_SYSTEM), Cause.LEFT_OUT, "system later", 1, "The user has moved", "<end><user>And",
    ),
    "calls left out": (
        toy(shape=_SHAPE.replace("m.tool_calls or []", "[]")),
        Cause.LEFT_OUT, "tool loop", 1, "look_up_weather", "<end><tool>",
    ),
    "a count of messages in front": (
        toy(head="{{ messages | length }}"), Cause.UNKNOWN, "system", 1, "2<system>", "4<system>",
    ),
}  # fmt: skip
