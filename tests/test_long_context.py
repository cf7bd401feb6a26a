"""A context above the model's own."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.core import long_context
from proxy.core.model_shape import shape_of
from tests import model_configs as known


def test_qwen_gets_yarn_with_all_that_vllm_asks_for() -> None:
    """Theta, since the override takes the place of the whole; the longer maximum, without which vLLM 0.32 refuses."""
    word, value = shlex.split(long_context.flag(shape_of(known.QWEN25_7B), 65536))
    assert word == "--hf-overrides"
    assert json.loads(value) == {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
        },
        "max_position_embeddings": 65536,
    }


@pytest.mark.parametrize("tokens", [1, 32768])
def test_within_the_native_context_nothing_is_changed(tokens: int) -> None:
    assert long_context.flag(shape_of(known.QWEN25_7B), tokens) == ""


@pytest.mark.parametrize("config", [known.LLAMA31_8B, known.GEMMA3_27B, known.GPT_OSS_20B, known.DEEPSEEK_V3])
def test_positions_that_are_scaled_already_are_not_scaled_again(config: Mapping[str, Any]) -> None:
    shape = shape_of(config)
    assert not long_context.can_stretch(shape) and long_context.overrides(shape, 10**7) is None


def test_the_cost_is_told_and_more_so_beyond_what_is_known_to_work() -> None:
    shape = shape_of(known.QWEN25_7B)
    assert "static" in long_context.cost(shape, 40_000) and "factor of 2" in long_context.cost(shape, 40_000)
    assert "nobody vouches" in long_context.cost(shape, 200_000)
