"""What vLLM does with a prompt, without I/O: a tokenizer, Qwen2.5's chat template, the prefix cache, the refusals.

Behaviour observed on vLLM 0.32.0; the prefix cache follows `vllm/v1/core/kv_cache_utils.py` and `kv_cache_manager.py`.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Body = Mapping[str, object]

# Loses no character and never makes a token out of nothing, so tokens <= bytes as with a byte-level tokenizer.
TOKEN = re.compile(r"<\|[a-z_]+\|>|<t\d+>| ?[^\W\d_]{1,6}|\d|\n+| +|\s|_|[^\w\s]")
DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TOOLS_HEAD = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


class Refused(Exception):
    """An answer of vLLM other than 200: the status and the error envelope of its handlers."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass
class Vocabulary:
    """Token ids in the order in which their texts were first seen: the same texts give the same ids in one process."""

    ids: dict[str, int] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; `decode` gives the text back."""
        return [self._id(piece) for piece in TOKEN.findall(text)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`; an id that was never given out is an empty text."""
        return "".join(self.texts[token] for token in tokens if 0 <= token < len(self.texts))

    def _id(self, piece: str) -> int:
        known = self.ids.get(piece)
        if known is None:
            known = self.ids[piece] = len(self.texts)
            self.texts.append(piece)
        return known


@dataclass
class PrefixCache:
    """Full blocks only, each hashed with its parent; the salt is in the first block, the chain carries it on."""

    block_size: int = 16
    hashes: set[bytes] = field(default_factory=set)

    def hit(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Return how many leading tokens are cached.  A full hit still computes its last token, so its last block."""
        usable = (len(tokens) - 1) // self.block_size
        found = 0
        for block_hash in self._chain(tokens[: usable * self.block_size], salt):
            if block_hash not in self.hashes:
                break
            found += self.block_size
        return found

    def store(self, tokens: Sequence[int], salt: str | None = None) -> None:
        """Enter every full block of `tokens`."""
        self.hashes.update(self._chain(tokens, salt))

    def _chain(self, tokens: Sequence[int], salt: str | None) -> Iterable[bytes]:
        parent = b"vllm-none-hash" if salt is None else b"vllm-none-hash\0" + salt.encode()
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = array("q", tokens[start : start + self.block_size]).tobytes()
            parent = hashlib.sha256(parent + block).digest()
            yield parent


def text_of(content: object) -> str:
    """Return a message's content as the template sees it: the text parts of a list joined by line feeds."""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return "\n".join(str(part["text"]) if "text" in part else "<|image_pad|>" for part in parts)
    return "" if content is None else str(content)


def tool_call_text(name: str, arguments: str) -> str:
    """Return one tool call as the model writes it, its arguments spelled as they are."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _arguments(call: Mapping[str, object]) -> str:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    # vLLM parses the string before the template, so the template renders the parsed value, spaces and all.
    parsed = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
    return json.dumps(parsed, ensure_ascii=False)


def _assistant(message: Body) -> str:
    calls = message.get("tool_calls")
    content = text_of(message.get("content"))
    if not isinstance(calls, list) or not calls:
        return f"<|im_start|>assistant\n{content}<|im_end|>\n"
    rendered = "".join("\n" + tool_call_text(str(call["function"]["name"]), _arguments(call)) for call in calls)
    return "<|im_start|>assistant" + ("\n" + content if content else "") + rendered + "<|im_end|>\n"


def _head(messages: Sequence[Body], tools: object) -> str:
    system = text_of(messages[0].get("content")) if messages[0].get("role") == "system" else DEFAULT_SYSTEM
    if isinstance(tools, list) and tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        system += TOOLS_HEAD + listed + TOOLS_TAIL
    return f"<|im_start|>system\n{system}<|im_end|>\n"


def render(body: Body) -> str:
    """Return the prompt of a chat request in Qwen2.5's layout: system text, tools, turns, generation prompt."""
    messages = body["messages"]
    assert isinstance(messages, list)
    out = [_head(messages, body.get("tools"))]
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "system" and index == 0:
            continue
        if role == "assistant":
            out.append(_assistant(message))
        elif role == "tool":
            first = messages[index - 1].get("role") != "tool"
            last = index + 1 == len(messages) or messages[index + 1].get("role") != "tool"
            out.append("<|im_start|>user" if first else "")
            out.append(f"\n<tool_response>\n{text_of(message.get('content'))}\n</tool_response>")
            out.append("<|im_end|>\n" if last else "")
        else:
            out.append(f"<|im_start|>{role}\n{text_of(message.get('content'))}<|im_end|>\n")
    prompt = "".join(out)
    if body.get("continue_final_message"):
        return prompt.removesuffix("<|im_end|>\n")
    return prompt + ("<|im_start|>assistant\n" if body.get("add_generation_prompt", True) else "")


@dataclass(frozen=True)
class Rules:
    """What this server accepts: its limits, its template, its flags."""

    model: str = "fake"
    max_model_len: int = 8192
    tool_parser: bool = True
    multimodal: bool = False
    template_refuses_late_system: bool = False
    template_refuses_user_twice: bool = False


def check(body: Body, rules: Rules) -> None:
    """Raise what vLLM answers to a request that it refuses before it knows the prompt."""
    model = body.get("model")
    if model and model != rules.model:
        raise Refused(404, f"The model `{model}` does not exist. Valid aliases: {rules.model}.", "NotFoundError")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= 128 or set(salt) & set("@/\\\0")):
        raise Refused(400, "Parameter 'cache_salt' must be a non-empty string.", param="cache_salt")
    if body.get("stream_options") and not body.get("stream"):
        raise Refused(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if isinstance(limit, int) and limit < 1:
        raise Refused(400, f"max_tokens must be at least 1, got {limit}. (parameter=max_tokens, value={limit})")
    if isinstance(limit, int) and limit > rules.max_model_len:
        raise Refused(
            400,
            f"max_tokens={limit} cannot be greater than max_model_len={rules.max_model_len}. "
            f"Please request fewer output tokens. (parameter=max_tokens, value={limit})",
        )


def check_chat(body: Body, rules: Rules) -> None:
    """Raise what vLLM, or the model's template, answers to messages that it refuses."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Refused(400, "1 validation error: messages must be a list of objects", "Bad Request")
    if not messages:
        raise Refused(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    if body.get("continue_final_message") and body.get("add_generation_prompt", True):
        raise Refused(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if body.get("tools") and body.get("tool_choice", "auto") == "auto" and not rules.tool_parser:
        raise Refused(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    roles = [message.get("role") for message in messages]
    if rules.template_refuses_late_system and "system" in roles[1:]:
        raise Refused(400, "System message must be at the beginning.")
    if rules.template_refuses_user_twice and ("user", "user") in pairwise(roles):
        raise Refused(400, "Conversation roles must alternate user/assistant/user/assistant/...")
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    if not rules.multimodal and any(part.get("type") == "image_url" for part in parts):
        raise Refused(400, f"{rules.model} is not a multimodal model")


def room(n_prompt: int, body: Body, rules: Rules) -> int:
    """Return how many tokens may be generated; raise what vLLM answers to a prompt that leaves no room."""
    if n_prompt > rules.max_model_len:
        raise Refused(
            400,
            f"This model's maximum context length is {rules.max_model_len} tokens. However, your prompt contains at "
            f"least {rules.max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={rules.max_model_len + 1})",
            param="input_tokens",
        )
    if n_prompt == rules.max_model_len:
        raise Refused(400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    left = rules.max_model_len - n_prompt
    return min(limit, left) if isinstance(limit, int) else left
