"""Reading a model's config.json."""

from collections.abc import Mapping
from typing import Any

import pytest

from proxy.core.model_shape import ShapeError, rope_type, shape_of
from tests import model_configs as known


@pytest.mark.parametrize(
    ("config", "full", "windows"),
    [
        (known.QWEN25_7B, 28, {}),  # its window is switched off
        (known.LLAMA31_8B, 32, {}),
        (known.MISTRAL_7B_V01, 0, {4096: 32}),
        (known.GEMMA2_9B, 21, {4096: 21}),
        (known.GEMMA3_27B, 10, {1024: 52}),
        (known.GPT_OSS_20B, 12, {128: 12}),
        (known.QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 20}, 20, {131072: 8}),
        (known.QWEN3_30B_A3B | {"layer_types": ["linear_attention"] * 36 + ["full_attention"] * 12}, 12, {0: 36}),
        (known.QWEN3_30B_A3B | {"full_attention_interval": 4}, 12, {0: 36}),
    ],
)
def test_how_far_each_layer_looks_back(config: Mapping[str, Any], full: int, windows: dict[int, int]) -> None:
    """By switch, by pattern, by layer_types, by the model's kind."""
    found = shape_of(config).windows
    assert found.count(None) == full
    assert {size: found.count(size) for size in set(found) if size is not None} == windows


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (known.QWEN25_7B, 32768),
        (known.LLAMA31_8B, 131072),  # scaled already
        (known.GEMMA3_27B, 131072),  # scaled already, though linear
        (known.GPT_OSS_20B, 131072),
        (known.MISTRAL_7B_V01 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, 65536),
    ],
)
def test_the_native_context_is_what_vllm_derives(config: Mapping[str, Any], tokens: int) -> None:
    """vLLM 0.32 multiplies by the factor of linear and dynamic kinds alone."""
    assert shape_of(config).native_tokens == tokens


def test_rotary_parameters_of_both_spellings_are_read() -> None:
    """transformers 5 calls them rope_parameters, holds theta in them, and may nest them by layer type."""
    new = {key: value for key, value in known.QWEN25_7B.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default"}
    assert shape_of(new).rope["rope_theta"] == 1e6 and rope_type(shape_of(new).rope) == "default"
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert rope_type(shape_of(new | {"rope_parameters": nested}).rope) == "nested"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "num_hidden_layers"),
        (known.QWEN25_7B | {"vocab_size": None}, "vocab_size"),
        (known.QWEN25_7B | {"num_hidden_layers": "28"}, "whole number"),
        (known.QWEN25_7B | {"hidden_size": -1}, "whole number"),
        ({"model_type": "nemotron_h", "mamba_num_heads": 8}, "Mamba"),
    ],
)
def test_what_is_no_language_model_is_refused_in_a_sentence(config: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ShapeError, match=told) as caught:
        shape_of(config)
    assert str(caught.value).endswith((".", "?"))


def test_layers_without_experts_are_told_from_those_with_them() -> None:
    """DeepSeek's first layers are dense; a step of two makes every second layer sparse; listed layers are dense."""
    deepseek = shape_of(known.DEEPSEEK_V3).experts
    assert deepseek is not None and (deepseek.layers, deepseek.shared_width) == (58, 2048)
    stepped = shape_of(known.QWEN3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}).experts
    assert stepped is not None and stepped.layers == 23
