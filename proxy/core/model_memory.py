"""What a model takes of a card: its weights, and its keys and values for each token."""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.model_shape import ModelShape

FP8_BYTES = 1


@dataclass(frozen=True, slots=True)
class Parameters:
    """Weights by what a quantised checkpoint does with them: matrices of layers, those of experts, everything else."""

    matrices: int
    experts: int
    rest: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.experts + self.rest


def parameters_of(shape: ModelShape) -> Parameters:
    """Count the weights, from the shapes."""
    attention, attention_rest = _attention(shape)
    hidden, found = shape.hidden, shape.experts
    linear = sum(window == 0 for window in shape.windows)
    matrices = shape.layers * attention
    rest = shape.layers * (attention_rest + shape.norms * hidden) + hidden
    rest += shape.vocabulary * hidden * (1 if shape.tied else 2) + shape.vision_parameters
    dense_layers = shape.layers - (found.layers if found else 0)
    ways = 3 if shape.gated else 2
    matrices += dense_layers * ways * hidden * shape.mlp_width
    # A layer of linear attention has a gate beside its four matrices.
    matrices += linear * shape.heads * shape.head_width * hidden
    experts = 0
    if found is not None:
        experts = found.layers * found.count * 3 * hidden * found.width
        matrices += found.layers * 3 * hidden * found.shared_width
        rest += found.layers * hidden * found.count  # the router, which is never quantised
        if found.biased:
            rest += found.layers * found.count * (2 * found.width + hidden + 1)
    return Parameters(matrices, experts, rest)


def _attention(shape: ModelShape) -> tuple[int, int]:
    """Return the weights of one layer's attention: in matrices, and in biases and norms."""
    hidden, latent = shape.hidden, shape.latent
    if latent is not None:
        query = shape.heads * (latent.nope_width + latent.rope_width)
        queries = latent.query_rank * (hidden + query) if latent.query_rank else hidden * query
        keys = hidden * (latent.kv_rank + latent.rope_width)
        keys += latent.kv_rank * shape.heads * (latent.nope_width + latent.value_width)
        output = shape.heads * latent.value_width * hidden
        return queries + keys + output, latent.query_rank + latent.kv_rank
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    rest = (queries + 2 * keys if shape.qkv_bias else 0) + (hidden if shape.output_bias else 0)
    rest += 2 * shape.head_width if shape.head_norms else 0
    return hidden * (2 * queries + 2 * keys), rest


def weight_bytes(shape: ModelShape) -> int:
    """Return what the weights take in all, in bytes, as vLLM holds them."""
    found, method = parameters_of(shape), shape.quantization
    if method is None:
        return found.total * shape.number_bytes
    matrices = shape.number_bytes if method.experts_only else method.weight_bytes
    whole = found.experts * method.weight_bytes + found.matrices * matrices + found.rest * shape.number_bytes
    return int(whole)


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes of keys and values on one card: of layers that see everything, and of each window's layers."""

    full_bytes: int  # a token
    windowed: Sequence[tuple[int, int]]  # (window in tokens, bytes a token)

    @property
    def token_bytes(self) -> int:
        """What one token takes, in all layers."""
        return self.full_bytes + sum(each for _, each in self.windowed)

    def chat_bytes(self, tokens: int) -> int:
        """Return what a chat of that many tokens takes: a layer with a window keeps no more than that."""
        return self.full_bytes * tokens + sum(each * min(tokens, window) for window, each in self.windowed)


def kv_cost(shape: ModelShape, *, gpus: int = 1, fp8: bool = False) -> KvCost:
    """Return the cost on one of `gpus` cards: heads are spread over them, a latent vector is on each."""
    number = FP8_BYTES if fp8 else shape.number_bytes
    if shape.latent is not None:
        layer = (shape.latent.kv_rank + shape.latent.rope_width) * number
    else:
        layer = 2 * -(-shape.kv_heads // gpus) * shape.head_width * number
    full = sum(window is None for window in shape.windows)
    sizes = sorted({window for window in shape.windows if window})
    return KvCost(layer * full, tuple((size, layer * shape.windows.count(size)) for size in sizes))
