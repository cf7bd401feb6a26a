"""The flags and settings that go with a plan."""

import re
from typing import Any

from proxy.config import load_config
from proxy.core.cards import CARDS, Card
from proxy.core.model_shape import shape_of
from proxy.core.plan import Wish, fit
from proxy.core.plan_flags import flags, offloading_gib, settings
from tests import model_configs as known

# Of `vllm serve --help=all`, version 0.32.0; tests/e2e/test_plan.py asks a real one.
OF_VLLM = {
    "--max-model-len", "--gpu-memory-utilization", "--tensor-parallel-size", "--hf-overrides", "--kv-cache-dtype",
    "--kv-offloading-size", "--max-num-seqs", "--enable-prefix-caching", "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice", "--tool-call-parser", "--scheduling-policy", "--shutdown-timeout",
}  # fmt: skip
CARD = {card.name: card for card in CARDS}


def told(config: Any, card: Card, **wish: Any) -> dict[str, str]:
    """Return the flags' texts by their first word."""
    values: dict[str, Any] = {"gpus": 1, "users": 10, "context_tokens": 32768, "output_tokens": 2048}
    asked = Wish(**{"card": card, "utilization": 0.92, **values, **wish})
    shape = shape_of(config)
    found = flags(shape, asked, fit(shape, asked))
    assert all(each.reason for each in found)
    return {each.text.split()[0]: each.text for each in found}


def test_only_flags_that_vllm_has_are_given() -> None:
    """Whatever is asked for."""
    small = told(known.QWEN25_7B, CARD["RTX 4090"], users=50, context_tokens=65536, fp8_kv=True)
    large = told(known.LLAMA31_70B, CARD["H100"], gpus=4)
    words = {word for text in [*small.values(), *large.values()] for word in re.findall(r"(?<!\S)--[a-z-]+", text)}
    assert words == OF_VLLM


def test_host_memory_is_added_where_not_all_chats_stay_warm() -> None:
    """As much as holds all of them, in GiB over all cards."""
    assert "--kv-offloading-size" not in told(known.QWEN25_7B, CARD["H200"])
    assert told(known.QWEN25_7B, CARD["RTX 3090"])["--kv-offloading-size"] == "--kv-offloading-size 18"
    shape = shape_of(known.QWEN25_7B)
    for gpus in (1, 2, 4):
        wish = Wish(CARD["RTX 3090"], gpus, 50, 32768, 2048, 0.92)
        assert offloading_gib(wish, fit(shape, wish)) == 88


def test_the_tool_parser_is_that_of_the_model_and_none_is_guessed() -> None:
    assert told(known.QWEN25_7B, CARD["H200"])["--enable-auto-tool-choice"].endswith(" hermes")
    assert told(known.LLAMA31_8B, CARD["H200"])["--enable-auto-tool-choice"].endswith(" llama3_json")
    assert told(known.GPT_OSS_20B, CARD["H200"])["--enable-auto-tool-choice"].endswith(" openai")
    assert "--enable-auto-tool-choice" not in told(known.GEMMA2_9B, CARD["H200"], context_tokens=8192)


def test_the_settings_are_ones_that_the_proxy_takes(tmp_path: Any) -> None:
    """All of them, for many users and long chats, as lines of a TOML file."""
    wish = Wish(CARD["H200"], 8, 1000, 1_000_000, 4096, 0.92)
    lines = [each.text for each in settings(wish)]
    assert len(lines) == 5
    file = tmp_path / "config.toml"
    file.write_text("\n".join(lines))
    config = load_config({"config": str(file)})
    assert (config.lengths.max_output_tokens, config.lengths.default_output_tokens) == (4096, 2048)
    assert config.sessions.max_live == 20_000
