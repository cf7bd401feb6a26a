"""What a model takes: weights and keys and values, against the known figures of well-known models."""

from collections.abc import Mapping
from typing import Any

import pytest

from proxy.core.model_memory import kv_cost, parameters_of, weight_bytes
from proxy.core.model_shape import shape_of
from tests import model_configs as known


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (known.QWEN25_7B, 7_615_616_512),
        (known.QWEN25_32B, 32_763_876_352),
        (known.LLAMA31_8B, 8_030_261_248),
        (known.LLAMA31_70B, 70_553_706_496),
        (known.QWEN3_30B_A3B, 30_532_122_624),
        (known.MISTRAL_7B_V01, 7_241_732_096),
        (known.MIXTRAL_8X7B, 46_702_792_704),
        (known.GEMMA2_9B, 9_241_705_984),
    ],
)
def test_the_parameters_are_counted_to_the_last_one(config: Mapping[str, Any], parameters: int) -> None:
    """As the checkpoints on the hub have them."""
    assert parameters_of(shape_of(config)).total == parameters


@pytest.mark.parametrize(
    ("config", "billions"), [(known.DEEPSEEK_V3, 671.0), (known.GPT_OSS_20B, 20.9), (known.GEMMA3_27B, 27.4)]
)
def test_the_parameters_of_the_odd_ones_are_near(config: Mapping[str, Any], billions: float) -> None:
    """Latent attention, biased experts, an image encoder: within half a percent."""
    assert parameters_of(shape_of(config)).total / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("config", "gigabytes"),
    [(known.QWEN25_7B, 15.23), (known.QWEN25_72B_AWQ, 41.6), (known.GPT_OSS_20B, 13.76), (known.DEEPSEEK_V3, 673)],
)
def test_the_weights_are_as_large_as_the_files(config: Mapping[str, Any], gigabytes: float) -> None:
    """In bf16, in 4 bits with scales beside embeddings in 16, with only the experts quantised, in FP8."""
    assert weight_bytes(shape_of(config)) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (known.QWEN25_7B, 57_344),
        (known.QWEN25_32B, 262_144),
        (known.QWEN25_72B_AWQ, 327_680),
        (known.LLAMA31_8B, 131_072),
        (known.LLAMA31_70B, 327_680),
        (known.QWEN3_30B_A3B, 98_304),
        (known.DEEPSEEK_V3, 61 * 576 * 2),
    ],
)
def test_bytes_of_keys_and_values_a_token(config: Mapping[str, Any], size: int) -> None:
    """In 16 bits; half of it in FP8."""
    assert kv_cost(shape_of(config)).token_bytes == size
    assert kv_cost(shape_of(config), fp8=True).token_bytes == size // 2


def test_heads_are_spread_over_cards_and_a_latent_vector_is_not() -> None:
    """More cards than heads hold copies."""
    assert [kv_cost(shape_of(known.QWEN25_7B), gpus=gpus).token_bytes for gpus in (2, 4, 8)] == [28_672, 14_336, 14_336]
    assert kv_cost(shape_of(known.DEEPSEEK_V3), gpus=8).token_bytes == 70_272


def test_a_window_bounds_what_a_layer_keeps() -> None:
    """Gemma 2's second half of layers keeps 4,096 tokens; Mistral 7B v0.1 keeps no more at any length."""
    gemma = kv_cost(shape_of(known.GEMMA2_9B))
    assert gemma.chat_bytes(4096) == 4096 * gemma.token_bytes
    assert gemma.chat_bytes(8192) == 8192 * gemma.full_bytes + 4096 * (gemma.token_bytes - gemma.full_bytes)
    mistral = kv_cost(shape_of(known.MISTRAL_7B_V01))
    assert mistral.chat_bytes(32768) == mistral.chat_bytes(4096) == 4096 * 131_072
