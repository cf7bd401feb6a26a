"""Bytes of a quantised weight, by the checkpoint's own words."""

from typing import Any

import pytest

from proxy.core.quantization import quantization_of


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 1 + 3 / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0.5 + 2.5 / 128),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, 1),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 64}}},
            },
            0.5 + 2.5 / 64,
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5625),
        ({"quant_method": "mxfp4"}, 0.53125),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
    ],
)
def test_a_weight_takes_its_bits_and_its_share_of_the_scales(config: dict[str, Any], size: float) -> None:
    found = quantization_of(config)
    assert found is not None and found.weight_bytes == pytest.approx(size)


@pytest.mark.parametrize("config", [None, {}, {"quant_method": "unheard-of"}, {"bits": True}, []])
def test_what_is_not_quantised_or_not_known_counts_as_not_quantised(config: object) -> None:
    """The estimate is then too large, never too small."""
    assert quantization_of(config) is None
