"""How many bytes a quantised weight takes, by the checkpoint's own quantization_config."""

from collections.abc import Mapping
from dataclasses import dataclass

_SCALE_BYTES = 2
_USUAL_GROUP = 128


@dataclass(frozen=True, slots=True)
class Quantization:
    """The method's name, the bytes of one weight with its share of the scales, and whether it is experts alone."""

    method: str
    weight_bytes: float
    experts_only: bool = False


def quantization_of(config: object) -> Quantization | None:
    """Read a quantization_config; None where there is none, or one that quantises nothing."""
    if not isinstance(config, Mapping):
        return None
    method = str(config.get("quant_method") or config.get("quant_algo") or "").lower()
    if method == "mxfp4":
        # gpt-oss: blocks of 32 with one byte of scale; attention, router and embeddings stay as they are.
        return Quantization(method, 0.5 + 1 / 32, experts_only=True)
    if method == "bitsandbytes":
        return Quantization(method, 0.5 + 4 / 64 if config.get("load_in_4bit") else 1.0)
    if method == "compressed-tensors":
        return _compressed(config.get("config_groups"))
    if "fp4" in method or "nvfp4" in str(config.get("quant_algo")).lower():
        return Quantization("nvfp4", 0.5 + 1 / 16)
    bits = config.get("bits") or config.get("w_bit")
    if isinstance(bits, int) and 1 < bits < 16:
        return Quantization(method, _grouped(bits, config.get("group_size") or config.get("q_group_size")))
    if "fp8" in method or method in ("modelopt", "fbgemm_fp8"):
        return Quantization(method, 1.0)
    return None


def _compressed(groups: object) -> Quantization | None:
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(bits := weights.get("num_bits"), int):
            grouped = _grouped(bits, weights.get("group_size")) if bits < 8 else bits / 8
            return Quantization("compressed-tensors", grouped)
    return None


def _grouped(bits: int, group: object) -> float:
    """Return the bytes of a weight: its bits, and its share of a scale of 16 bits and a zero point of `bits`."""
    size = group if isinstance(group, int) and group > 0 else _USUAL_GROUP
    return bits / 8 + (_SCALE_BYTES + bits / 8) / size
