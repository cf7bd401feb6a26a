"""What fits on the cards: weights, what vLLM needs besides, and the tokens of chats that stay in the cache.

An estimate.  What the runtime takes was set by one measurement: vLLM 0.26 on an H200, where Qwen2.5-7B at
--gpu-memory-utilization 0.85 had 1,931,648 tokens.
"""

from dataclasses import dataclass, replace

from proxy.core.cards import GIB, Card
from proxy.core.model_memory import KvCost, kv_cost, weight_bytes
from proxy.core.model_shape import ModelShape

BLOCK_TOKENS = 16
# The CUDA context, its libraries and the captured graphs; between cards the buffers of NCCL.
_RUNTIME_BYTES = int(0.45 * GIB)
_RUNTIME_BYTES_JOINED = int(0.6 * GIB)
_LATENT_WORKSPACE_TOKENS = 65_536
_LOGIT_BYTES = 6  # 16 bits, and a copy in 32 to sample from
_GPU_COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for."""

    card: Card
    gpus: int
    users: int
    context_tokens: int  # of one chat, its answers included
    output_tokens: int  # of one answer
    utilization: float
    fp8_kv: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """What comes of it, on each card unless it says otherwise."""

    weights_bytes: int
    runtime_bytes: int
    kv_bytes: int  # 0 or less: there is no room for any
    cost: KvCost
    kv_tokens: int  # in chats of the wished context
    chat_bytes: int
    warm_chats: int

    @property
    def starts(self) -> bool:
        """Whether vLLM would start: one chat of full length must fit."""
        return self.warm_chats >= 1


def fit(shape: ModelShape, wish: Wish, *, checkpoint_bytes: int | None = None) -> Fit:
    """Work out what fits; `checkpoint_bytes` is the size of the weights where it is known."""
    cost = kv_cost(shape, gpus=wish.gpus, fp8=wish.fp8_kv)
    weights = -(-(checkpoint_bytes or weight_bytes(shape)) // wish.gpus)
    runtime = _runtime_bytes(shape, wish)
    room = int(wish.card.memory_bytes * wish.utilization) - weights - runtime
    chat = cost.chat_bytes(_whole_blocks(wish.context_tokens))
    tokens = max(0, room) * wish.context_tokens // chat if chat else 0
    return Fit(weights, runtime, room, cost, _whole_blocks(tokens - BLOCK_TOKENS + 1), chat, max(0, room) // chat)


def _whole_blocks(tokens: int) -> int:
    return max(0, -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS)


def _runtime_bytes(shape: ModelShape, wish: Wish) -> int:
    """Return what vLLM finds in use when it profiles: the largest step, and what the runtime holds."""
    batch, places = wish.card.usual_batch
    width = 3 * shape.mlp_width // wish.gpus
    if shape.experts is not None:
        dense = width if shape.experts.layers < shape.layers else 0
        width = max(dense, shape.experts.per_token * (3 * shape.experts.width // wish.gpus + shape.hidden))
    step = batch * shape.number_bytes * (width + 2 * shape.hidden)
    step = max(step, places_of(wish, places) * shape.vocabulary * _LOGIT_BYTES)
    if shape.latent is not None:
        heads = -(-shape.heads // wish.gpus)
        step += _LATENT_WORKSPACE_TOKENS * heads * (shape.latent.nope_width + shape.latent.value_width) * 2
    return step + _RUNTIME_BYTES + (_RUNTIME_BYTES_JOINED if wish.gpus > 1 else 0)


def places_of(wish: Wish, usual: int) -> int:
    """Return how many requests vLLM should run at once: each user's chat, and a task beside it."""
    return min(usual, max(16, -(-2 * wish.users // 8) * 8))


def can_share(shape: ModelShape, gpus: int) -> bool:
    """Say whether attention can be spread over that many cards: whole heads each."""
    return shape.heads % gpus == 0 and (shape.kv_heads % gpus == 0 or gpus % shape.kv_heads == 0)


def gpus_needed(shape: ModelShape, wish: Wish, *, checkpoint_bytes: int | None = None) -> int | None:
    """Return the fewest cards on which vLLM would start, None if it is more than sixteen."""
    for gpus in _GPU_COUNTS:
        if can_share(shape, gpus) and fit(shape, replace(wish, gpus=gpus), checkpoint_bytes=checkpoint_bytes).starts:
            return gpus
    return None


def most_context(found: Fit, wish: Wish) -> int:
    """Return the longest context for which vLLM would start on these cards, in whole blocks; 0 if none."""
    low, high = 0, wish.context_tokens // BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        fits = found.cost.chat_bytes(middle * BLOCK_TOKENS) <= found.kv_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * BLOCK_TOKENS
