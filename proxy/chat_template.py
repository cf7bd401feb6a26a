"""Chat templates as files: those that come with the proxy, and how vLLM renders one (by transformers' rules)."""

import copy
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proxy.core.request import Message
from proxy.core.template_cases import TOOLS, Ask
from proxy.core.template_check import Refused, Rendering
from proxy.core.text import text_of

# A clock that stands: two runs say the same.  The other one shows what of a prompt depends on it.
NOW = datetime.datetime(2026, 2, 3, 4, 5, 6)
LATER = datetime.datetime(2027, 3, 4, 5, 6, 7)
# In place of special tokens that no file names.
UNKNOWN_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateFailed(Exception):
    """A template, or a file beside it, cannot be used; the text says why, in one sentence."""


def bundled_folder() -> Path:
    """Return the folder of the project's own templates: in the package when installed, else in the checkout."""
    package = Path(__file__).parent
    packed = package / "chat_templates"
    return packed if packed.is_dir() else package.parent / "deploy" / "chat_templates"


def bundled() -> Mapping[str, Path]:
    """Return the project's own templates by name ("qwen3"), for `vllm serve --chat-template`."""
    return {path.stem: path for path in sorted(bundled_folder().glob("*.jinja"))}


def read_template(path: Path) -> tuple[str, Mapping[str, str]]:
    """Return a template's text and the special tokens it may name; of a tokenizer_config.json its `chat_template`.

    Raises TemplateFailed.
    """
    text = _read(path)
    if path.suffix != ".json":
        return text, {}
    settings = _settings(path, text)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each["name"]: each["template"] for each in template if isinstance(each, dict)}
        template = named.get("default", next(iter(named.values()), None))
    if not isinstance(template, str):
        raise TemplateFailed(f"{path} holds no chat_template.")
    return template, _special_tokens(settings)


def read_special_tokens(path: Path) -> Mapping[str, str]:
    """Return the tokens that a tokenizer_config.json names, as templates know them.  Raises TemplateFailed."""
    return _special_tokens(_settings(path, _read(path)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise TemplateFailed(f"{path} cannot be read: {why}.") from None


def _settings(path: Path, text: str) -> Mapping[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise TemplateFailed(f"{path} is not a tokenizer_config.json.")
    return settings


def _special_tokens(settings: Mapping[str, Any]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        found |= {name: token} if isinstance(token, str) else {}
    return found


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> Node | list[Node]:
        """Return the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does: jinja2's own filter escapes signs of HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _compiled(text: str, clock: datetime.datetime) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: clock.strftime(form)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise TemplateFailed(f"The template is not valid: {error}.") from None


Encode = Callable[[str], tuple[tuple[int, ...], tuple[int, ...]]]
"""From text to the ids of its tokens and their offsets in characters."""


class _Encoding(Protocol):
    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]


def tokenizer(path: Path) -> Encode:
    """Return what turns text into tokens by a tokenizer.json.  Raises TemplateFailed, also without `tokenizers`."""
    try:
        module = cast(Any, import_module("tokenizers"))
    except ImportError:
        raise TemplateFailed("--tokenizer needs the package tokenizers: pip install 'prefix-proxy[tokens]'.") from None
    try:
        loaded = module.Tokenizer.from_file(str(path))
    except Exception:  # the library raises plain Exception for a missing or broken file
        raise TemplateFailed(f"{path} is not a tokenizer.json.") from None

    def encode(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        found: _Encoding = loaded.encode(text, add_special_tokens=False)
        return tuple(found.ids), tuple(begin for begin, _ in found.offsets)

    return encode


@dataclass(frozen=True, slots=True)
class FileRenderer:
    """Renders a template as vLLM would: the same preparation of messages, the same names within the template."""

    template: jinja2.Template
    tokens: Mapping[str, str]
    encode: Encode | None

    @classmethod
    def of(
        cls, text: str, tokens: Mapping[str, str], *, clock: datetime.datetime = NOW, encode: Encode | None = None
    ) -> "FileRenderer":
        """Compile a template's text.  Raises TemplateFailed."""
        return cls(_compiled(text, clock), tokens or UNKNOWN_TOKENS, encode)

    def render(self, ask: Ask) -> Rendering | Refused:
        """Return the prompt, or why the template would not make one."""
        messages = [_prepared(message) for message in ask.messages]
        if ask.continues:
            messages[-1]["content"] = f"{messages[-1]['content']}{_CONTINUE}"
        tools = copy.deepcopy(list(TOOLS)) if ask.tools else None
        fields = {**self.tokens, "documents": None, **(ask.kwargs or {})}
        try:
            text = self.template.render(messages=messages, tools=tools, add_generation_prompt=ask.generation, **fields)
        except Exception as error:  # a template is a program: its faults are of any kind
            return Refused(str(error) or type(error).__name__)
        if ask.continues:
            text = _until_mark(text)
        if self.encode is None:
            return Rendering(text)
        return Rendering(text, *self.encode(text))


def _until_mark(text: str) -> str:
    """Cut where the message to be continued ends, as transformers does."""
    before, _, after = text.rpartition(_CONTINUE.strip())
    return before if after.startswith(" ") else before.rstrip()


def _prepared(message: Message) -> dict[str, Any]:
    """Return a message as vLLM hands it to a template: content as text, the arguments of calls parsed."""
    made: dict[str, Any] = copy.deepcopy(dict(message))
    content = made.get("content")
    made["content"] = (
        "\n".join(text_of({"content": [part]}) for part in content) if isinstance(content, list) else (content or "")
    )
    for call in made.get("tool_calls") or []:
        arguments = call["function"].get("arguments")
        call["function"]["arguments"] = _parsed(arguments)
    return made


def _parsed(arguments: object) -> object:
    """vLLM parses arguments before any template: what is not an object becomes an empty one."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}
