"""The flags for `vllm serve` and the proxy's settings that go with a plan, each with its reason.

Only flags that vLLM 0.32 has; tests/test_plan_flags.py holds them against its list.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from proxy.core import long_context
from proxy.core.cards import GIB
from proxy.core.model_shape import ModelShape
from proxy.core.plan import Fit, Wish, places_of

# By the beginning of model_type; a name of its own stands before the one that it begins with.
_TOOL_PARSERS: Mapping[str, str] = {
    "qwen2": "hermes",
    "qwen3": "hermes",
    "llama": "llama3_json",
    "mistral": "mistral",
    "mixtral": "mistral",
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "openai",
}
_USUAL_OUTPUT_TOKENS = 2048
_USUAL_SESSION_BYTES = 4 * 1024 * 1024
_USUAL_SESSIONS = 10_000
_TEXT_BYTES_PER_TOKEN = 8  # about four, told and sent
_CHATS_PER_USER = 20


@dataclass(frozen=True, slots=True)
class Advice:
    """A flag or a setting as one writes it, and why."""

    text: str
    reason: str


def flags(shape: ModelShape, wish: Wish, found: Fit) -> tuple[Advice, ...]:
    """Return the flags to start vLLM with."""
    return tuple([*_memory_flags(shape, wish, found), *_serving_flags(shape, wish)])


def _memory_flags(shape: ModelShape, wish: Wish, found: Fit) -> Iterator[Advice]:
    yield Advice(f"--max-model-len {wish.context_tokens}", "the longest chat; the proxy trims to what vLLM reports")
    yield Advice(
        f"--gpu-memory-utilization {wish.utilization:g}",
        f"leaves {found.kv_bytes / GIB:.1f} GiB a card for keys and values",
    )
    if wish.gpus > 1:
        yield Advice(f"--tensor-parallel-size {wish.gpus}", "spreads weights, keys and values over the cards")
    if stretched := long_context.flag(shape, wish.context_tokens):
        why = f"YaRN: the model's own context is {shape.native_tokens:,} tokens"
        yield Advice(stretched, f"{why}; {long_context.cost(shape, wish.context_tokens)}")
    if wish.fp8_kv:
        yield Advice("--kv-cache-dtype fp8", "half the bytes a token, so twice the chats stay warm")
    if 0 < found.warm_chats < wish.users:
        size = offloading_gib(wish, found)
        reason = f"chats that leave the cards stay in host memory: {wish.users} chats take {size} GiB of it"
        yield Advice(f"--kv-offloading-size {size}", reason)


def _serving_flags(shape: ModelShape, wish: Wish) -> Iterator[Advice]:
    places = places_of(wish, wish.card.usual_batch[1])
    yield Advice(f"--max-num-seqs {places}", "each user's chat and a task beside it; more places cost memory")
    yield Advice("--enable-prefix-caching", "what the proxy is for; on by default, said so that it stays so")
    yield Advice("--enable-prompt-tokens-details", "usage says how much of a prompt was cached")
    parsers = (parser for kind, parser in _TOOL_PARSERS.items() if shape.model_type.startswith(kind))
    if parser := next(parsers, None):
        reason = "Open WebUI sends tools with every chat, which vLLM refuses otherwise"
        yield Advice(f"--enable-auto-tool-choice --tool-call-parser {parser}", reason)
    yield Advice("--scheduling-policy priority", "titles and tags wait behind chats (the proxy's step rank)")
    yield Advice("--shutdown-timeout 30", "at SIGTERM running answers may end")


def offloading_gib(wish: Wish, found: Fit) -> int:
    """Return how much host memory holds all users' chats, summed over the cards as vLLM counts it."""
    return -(-wish.users * found.chat_bytes * wish.gpus // GIB)


def settings(wish: Wish) -> tuple[Advice, ...]:
    """Return the proxy's settings, by their path, that should be said; defaults that do are left out."""
    default = min(wish.output_tokens, _USUAL_OUTPUT_TOKENS)
    out = [
        Advice(f"lengths.max_output_tokens = {wish.output_tokens}", "no answer is longer, whatever a client asks for"),
        Advice(
            f"lengths.default_output_tokens = {default}", "for requests without a limit: what a trim leaves room for"
        ),
    ]
    each = wish.context_tokens * _TEXT_BYTES_PER_TOKEN
    if each > _USUAL_SESSION_BYTES:
        out.append(Advice(f"sessions.max_bytes_each = {each}", "a chat of full length fits into its ledger"))
    chats = wish.users * _CHATS_PER_USER
    if chats > _USUAL_SESSIONS:
        out.append(Advice(f"sessions.max_live = {chats}", f"{_CHATS_PER_USER} chats a user are remembered"))
    total = wish.users * 2 * each
    if total > 256 * 1024 * 1024:
        out.append(Advice(f"sessions.max_bytes_total = {total}", "the ledgers of two full chats a user"))
    return tuple(out)
