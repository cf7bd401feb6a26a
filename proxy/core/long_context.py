"""A context above the model's native one: YaRN, as vLLM 0.32 takes it.

Its `--hf-overrides` must raise max_position_embeddings, too: seen there, the rope_parameters alone are refused with
"User-specified max_model_len is greater than the derived max_model_len".
"""

import json
from collections.abc import Mapping

from proxy.core.model_shape import ModelShape, rope_type

KNOWN_FACTOR = 4  # what Qwen's model cards speak of


def overrides(shape: ModelShape, context_tokens: int) -> Mapping[str, object] | None:
    """Return what stretches the positions to `context_tokens`; None where none is needed or none is possible."""
    if context_tokens <= shape.native_tokens or not can_stretch(shape):
        return None
    factor = factor_of(shape, context_tokens)
    theta = shape.rope.get("rope_theta")
    rope: dict[str, object] = {"rope_type": "yarn", "factor": float(factor)}
    rope["original_max_position_embeddings"] = shape.native_tokens
    # What is given takes the place of the whole: without theta the positions would be those of another model.
    rope |= {"rope_theta": theta} if theta is not None else {}
    return {"rope_parameters": rope, "max_position_embeddings": shape.native_tokens * factor}


def factor_of(shape: ModelShape, context_tokens: int) -> int:
    """Return how many times the native context is needed, in whole times."""
    return -(-context_tokens // shape.native_tokens)


def can_stretch(shape: ModelShape) -> bool:
    """Say whether YaRN can be added: one kind of plain rotary positions, not scaled already, and a known base."""
    return rope_type(shape.rope) == "default" and "rope_theta" in shape.rope and shape.latent is None


def flag(shape: ModelShape, context_tokens: int) -> str:
    """Return the flag for it as one types it, "" where none is needed or possible."""
    found = overrides(shape, context_tokens)
    return f"--hf-overrides '{json.dumps(found)}'" if found else ""


def cost(shape: ModelShape, context_tokens: int) -> str:
    """Say in a sentence what it costs."""
    factor = factor_of(shape, context_tokens)
    told = (
        f"vLLM's YaRN is static: the factor of {factor} holds for short prompts, too, and may make them a little worse"
    )
    if factor > KNOWN_FACTOR:
        return f"{told}; above {KNOWN_FACTOR} times the native context nobody vouches for the answers."
    return f"{told}. Leave it out if {shape.native_tokens:,} tokens are enough."
