"""The project's own templates: proven by the check, word for word, and beside the models' own where those are given."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.chat_template import (
    LATER,
    NOW,
    FileRenderer,
    TemplateFailed,
    bundled,
    read_special_tokens,
    read_template,
    tokenizer,
)
from proxy.core.request import Message
from proxy.core.template_cases import CASES, PROBES, Ask, calls, result, said, user
from proxy.core.template_check import Refused, Rendering, Traits, asks_of, judge_all, judge_clock, stable, traits_of

NAMES = ("llama3.1", "qwen2.5", "qwen3")
GOLDEN = Path(__file__).parent / "golden_templates"
# NAME=FOLDER, several with the system's path separator; a folder holds the tokenizer_config.json of that model.
ORIGINALS = dict(
    each.split("=", 1) for each in os.environ.get("PREFIX_PROXY_TEST_MODELS", "").split(os.pathsep) if "=" in each
)
ALL = Traits(tools=True, thinking=True, switch=True)
BOS = {"bos_token": "<bos>"}


def ours(name: str) -> FileRenderer:
    """Return one of our templates, ready to render."""
    return FileRenderer.of(read_template(bundled()[name])[0], BOS)


def prompt(renderer: FileRenderer, *messages: Message, **fields: Any) -> str:
    """Render messages; fails where the template refuses."""
    made = renderer.render(Ask(messages, **fields))
    assert isinstance(made, Rendering), made
    return made.text


def test_the_templates_that_come_with_the_proxy_are_found_by_name() -> None:
    """In the checkout and in the wheel alike."""
    assert tuple(bundled()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_of_our_templates_is_stable_in_every_case(name: str) -> None:
    """Nothing breaks, nothing is refused, and only what the model lacks is skipped."""
    renderer = ours(name)
    traits = traits_of({probe: renderer.render(ask) for probe, ask in PROBES.items()})
    assert traits == (ALL if name == "qwen3" else Traits(tools=True, thinking=False, switch=False))
    asks = asks_of(traits)
    rendered = {key: renderer.render(ask) for key, ask in asks.items()}
    verdicts = judge_all(rendered, traits)
    assert stable(verdicts)
    assert {each.case for each in verdicts if each.outcome != "stable" and each.counted} <= {
        case.name for case in CASES if {"thinking", "switch"} & set(case.needs) and name != "qwen3"
    }
    later = FileRenderer.of(read_template(bundled()[name])[0], BOS, clock=LATER)
    assert judge_clock(rendered, {key: later.render(ask) for key, ask in asks.items()}).outcome == "stable"


@pytest.mark.parametrize("name", NAMES)
def test_each_of_our_templates_renders_to_the_letter_what_is_written_down(name: str) -> None:
    """tests/golden_templates/NAME.txt: the last prompt of each case, as read by people."""
    written = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    renderer = ours(name)
    assert written == "".join(golden_part(renderer, case.name) for case in CASES)


def golden_part(renderer: FileRenderer, name: str) -> str:
    """Return the last prompt of a case under its name."""
    (_, number, _), ask = [each for each in asks_of(ALL).items() if each[0][0] == name and each[0][2] == "prompt"][-1]
    made = renderer.render(ask)
    return f"=== {name}, turn {number + 1}\n{made.text if isinstance(made, Rendering) else made.why}\n"


@pytest.mark.parametrize("name", NAMES)
def test_where_the_models_own_template_is_stable_ours_makes_the_same_prompts(name: str) -> None:
    """Equal text is equal tokens.  Needs the original: PREFIX_PROXY_TEST_MODELS="qwen2.5=FOLDER"."""
    if name not in ORIGINALS:
        pytest.skip(f"PREFIX_PROXY_TEST_MODELS names no folder for {name}")
    text, tokens = read_template(Path(ORIGINALS[name]) / "tokenizer_config.json")
    theirs, mine = FileRenderer.of(text, tokens), FileRenderer.of(read_template(bundled()[name])[0], tokens)
    traits = traits_of({probe: theirs.render(ask) for probe, ask in PROBES.items()})
    # Both get the same date: where the original takes it from the clock it is the one thing that ours does not.
    dated = {key: with_date(ask) for key, ask in asks_of(traits).items()}
    rendered = {key: theirs.render(ask) for key, ask in dated.items()}
    kept = [each.case for each in judge_all(rendered, traits) if each.outcome == "stable" or not each.counted]
    compared = [key for key in dated if key[0] in kept]
    assert len(kept) > 8
    assert [key for key in compared if mine.render(dated[key]) != rendered[key]] == []


def with_date(ask: Ask) -> Ask:
    """Return an ask that names the date, as an operator can."""
    return replace(ask, kwargs={**(ask.kwargs or {}), "date_string": NOW.strftime("%d %b %Y")})


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_are_text_go_in_as_they_were_generated(name: str) -> None:
    """vLLM parses them before; servers that do not keep the spelling."""
    template = ours(name).template
    spelled = '{"town":"Z\\u00fcrich" }'
    made = template.render(messages=[user("Q"), calls(spelled)], tools=None)
    assert f": {spelled}" + "}" in made


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}', "", None, '{"a": \n', "[1,2]"])
@pytest.mark.parametrize("name", NAMES)
def test_no_arguments_make_a_template_fail(name: str, arguments: object) -> None:
    """An object, a text, nothing, broken JSON, a list: as vLLM prepares them, and unprepared."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    wanted = '{"a": 1}' if arguments in ({"a": 1}, '{"a": 1}') else "{}"
    assert f'"f", "{"parameters" if name == "llama3.1" else "arguments"}": {wanted}' in prompt(ours(name), message)
    assert '"f"' in ours(name).template.render(messages=[message], tools=None)


def test_thinking_is_kept_however_it_is_told() -> None:
    """In a field of either name, or in the content; a reply without it gets none, and none is made up."""
    renderer = ours("qwen3")
    whole = "<think>\nhm\n</think>\n\n42"
    for field in ("reasoning", "reasoning_content"):
        told = {"role": "assistant", "content": "42", field: "hm"}
        assert f"assistant\n{whole}<|im_end|>" in prompt(renderer, user("Q"), told, user("R"))
    # As vLLM's parser gives it, with the line feeds that stand beside the tags.
    parsed = {"role": "assistant", "content": "\n\n42", "reasoning": "\nhm\n"}
    assert f"assistant\n{whole}<|im_end|>" in prompt(renderer, user("Q"), parsed, user("R"))
    assert f"assistant\n{whole}<|im_end|>" in prompt(renderer, user("Q"), said(whole), user("R"))
    assert "think" not in prompt(renderer, user("Q"), said("42"), user("R"))


def test_inline_thinking_before_a_call_stands_as_it_was_generated() -> None:
    """Clients strip the empty line between the two."""
    for told in ("<think>\nhm\n</think>\n\n", "<think>\nhm\n</think>"):
        made = prompt(ours("qwen3"), user("Q"), calls('{"a": 1}', text=told), result("r"))
        assert "<think>\nhm\n</think>\n\n<tool_call>\n" in made


def test_the_date_of_llama_is_the_operators_or_the_models_and_never_a_clocks() -> None:
    """`date_string` as in the model's own template."""
    renderer = ours("llama3.1")
    assert "Today Date: 26 Jul 2024\n" in prompt(renderer, user("Q"))
    assert "Today Date: 1 May 2026\n" in prompt(renderer, user("Q"), kwargs={"date_string": "1 May 2026"})


def test_tools_of_llama_stand_in_the_head_where_the_user_has_not_the_first_word() -> None:
    """A note about the time, before the user's first message, must not stand before the tools."""
    note: Message = {"role": "system", "content": "It is noon."}
    head: Message = {"role": "system", "content": "Be brief."}
    made = prompt(ours("llama3.1"), head, note, user("Q"), tools=True)
    assert made.index("look_up_weather") < made.index("Be brief.") < made.index("It is noon.")
    usual = prompt(ours("llama3.1"), head, user("Q"), tools=True)
    assert usual.index("Be brief.") < usual.index("<|start_header_id|>user") < usual.index("look_up_weather")


@pytest.mark.parametrize("name", NAMES)
def test_a_developer_message_is_a_system_message(name: str) -> None:
    """The models know no such role, and their own templates drop it or make one up."""
    told = [{"role": "developer", "content": "Be brief."}, user("Q")]
    same = [{"role": "system", "content": "Be brief."}, user("Q")]
    assert prompt(ours(name), *told) == prompt(ours(name), *same)


def test_a_template_is_rendered_by_the_rules_of_transformers() -> None:
    """Blocks are trimmed, JSON keeps its order and letters, loops break, `generation` marks nothing."""
    text = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n{% break %}\n{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}\n{{ strftime_now('%Y') }}{{ bos_token }}"
    )
    made = prompt(FileRenderer.of(text, BOS), {"role": "user", "content": "ü < é"}, user("2"))
    assert made == '{"role": "user", "content": "ü < é"}2026<bos>'


def test_content_parts_are_joined_as_vllm_joins_them() -> None:
    """By line feeds, for a template that takes text."""
    parts: Message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert "<|im_start|>user\na\nb<|im_end|>" in prompt(ours("qwen3"), parts)


@pytest.mark.parametrize(("shape", "wanted"), [("{{ x }}", "a  "), ("{{ x | trim }}", "a")])
def test_a_message_to_be_continued_is_left_open(shape: str, wanted: str) -> None:
    """With its white space, if the template keeps that."""
    text = "{% for m in messages %}" + shape.replace("x", "m.content") + "<end>{% endfor %}"
    made = prompt(FileRenderer.of(text, {}), said("a  "), continues=True, generation=False)
    assert made == wanted


def test_a_template_cannot_reach_out() -> None:
    """The sandbox of transformers: a template from somewhere is a program from somewhere."""
    text = "{{ messages.append(1) }}{{ ''.__class__.__mro__ }}"
    assert isinstance(FileRenderer.of(text, {}).render(Ask((user("Q"),))), Refused)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.jinja", b"\xff\xfe", "not UTF-8"),
        ("t.json", b"{", "not a tokenizer_config.json"),
        ("t.json", b'{"chat_template": 1}', "holds no chat_template"),
        ("missing.jinja", None, "No such file"),
    ],
)
def test_a_file_that_is_no_template_is_refused_in_a_sentence(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TemplateFailed, match=says):
        read_template(path)


def test_a_template_with_a_fault_of_syntax_is_refused_in_a_sentence() -> None:
    with pytest.raises(TemplateFailed, match="not valid"):
        FileRenderer.of("{% if %}", {})


@pytest.mark.parametrize("template", ["{{ bos_token }}", [{"name": "default", "template": "{{ bos_token }}"}]])
def test_a_tokenizer_config_gives_template_and_special_tokens(tmp_path: Path, template: object) -> None:
    """Tokens are texts or objects there, templates one or several by name."""
    path = tmp_path / "tokenizer_config.json"
    tokens: Mapping[str, object] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    path.write_text(json.dumps({"chat_template": template, **tokens}))
    assert read_template(path) == ("{{ bos_token }}", {"bos_token": "<s>", "eos_token": "</s>"})
    assert read_special_tokens(path) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_tokenizer_that_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Whether the package is missing or the file."""
    with pytest.raises(TemplateFailed, match=r"tokenizers|tokenizer\.json"):
        tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.skipif("qwen2.5" not in ORIGINALS, reason="PREFIX_PROXY_TEST_MODELS names no folder for qwen2.5")
def test_a_real_tokenizer_gives_tokens_and_their_places() -> None:
    """The offsets are those of characters."""
    pytest.importorskip("tokenizers")
    ids, starts = tokenizer(Path(ORIGINALS["qwen2.5"]) / "tokenizer.json")("<|im_start|>user\nZürich")
    assert ids[0] == 151644
    assert starts[:3] == (0, 12, 16)
