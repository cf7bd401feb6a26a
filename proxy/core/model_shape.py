"""The shape of a model as its config.json tells it: layers, heads, experts, windows, numbers, and native context.

Field names and defaults are those of transformers; where a field is left out its meaning there holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.core.quantization import Quantization, quantization_of

Config = Mapping[str, object]

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}
# Their config.json leaves out what the class has as its default.
_DEFAULTS: Mapping[str, Config] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "sliding_window_pattern": 6, "max_position_embeddings": 131_072,
    },
    "gemma2": {"sliding_window_pattern": 2},
    "cohere2": {"sliding_window_pattern": 4},
}  # fmt: skip
_TIED_UNLESS_TOLD = ("gemma", "cohere")
# Two matrices in the feed-forward part; all others have a third, the gate.
_UNGATED = frozenset({"falcon", "gpt_neox", "opt", "phi", "starcoder2", "bloom", "mpt"})


class ShapeError(Exception):
    """This config.json does not describe a model that can be planned for; the text says why, in one sentence."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: one compressed vector a token and layer, whatever the number of heads."""

    kv_rank: int
    rope_width: int
    query_rank: int  # 0: queries are not compressed
    nope_width: int
    value_width: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: what one layer holds, and how many layers are so."""

    count: int
    per_token: int
    width: int
    shared_width: int
    layers: int
    biased: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory depends on.  Widths in elements; `windows` has for each layer None where attention is full, the
    tokens that it looks back on, or 0 where a layer keeps no keys and values."""

    architecture: str
    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    mlp_width: int
    gated: bool
    tied: bool
    norms: int  # a layer's, each as wide as the hidden state
    head_norms: bool
    qkv_bias: bool
    output_bias: bool
    windows: tuple[int | None, ...]
    latent: Latent | None
    experts: Experts | None
    vision_parameters: int
    number_bytes: int  # of a weight that is not quantised, as it is served
    stored_bytes: int  # the same as the checkpoint stores it
    quantization: Quantization | None
    native_tokens: int
    rope: Config

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.windows)


def shape_of(config: Config) -> ModelShape:
    """Read a config.json; of a model with images, its text part.  Raises ShapeError."""
    text = _text_part(config)
    model_type = str(text.get("model_type") or "")
    layers, hidden = _whole(text, "num_hidden_layers", "n_layer"), _whole(text, "hidden_size", "n_embd")
    heads = _whole(text, "num_attention_heads", "n_head")
    architectures = text.get("architectures")
    stored = _DTYPE_BYTES.get(str(text.get("torch_dtype") or text.get("dtype") or "bfloat16"), 2)
    biased = bool(text.get("attention_bias"))
    qwen2 = model_type.startswith("qwen2")
    return ModelShape(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else model_type,
        model_type=model_type,
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(text, "num_key_value_heads", default=heads),
        head_width=_whole(text, "head_dim", default=hidden // heads),
        vocabulary=_whole(text, "vocab_size"),
        mlp_width=_whole(text, "intermediate_size", "n_inner", default=4 * hidden),
        gated=model_type not in _UNGATED,
        tied=bool(text.get("tie_word_embeddings", model_type.startswith(_TIED_UNLESS_TOLD))),
        norms=4 if model_type.startswith(("gemma2", "gemma3")) else 2,
        head_norms=model_type.startswith(("qwen3", "gemma3")),
        qkv_bias=biased or qwen2,
        output_bias=biased and not qwen2,
        windows=_windows(text, layers, model_type),
        latent=_latent(text),
        experts=_experts(text, layers, model_type),
        vision_parameters=_vision(config.get("vision_config")),
        number_bytes=2,  # vLLM serves float32 checkpoints in 16 bits, too
        stored_bytes=stored,
        quantization=quantization_of(text.get("quantization_config") or config.get("quantization_config")),
        native_tokens=_native(text, model_type),
        rope=_rope(text),
    )


def _text_part(config: Config) -> Config:
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(inner := config.get(name), Mapping):
            return _text_part({**{key: config[key] for key in config if key != name}, **inner})
    if any("mamba" in name or name == "hybrid_override_pattern" for name in config):
        raise ShapeError("This model has state-space (Mamba) layers, whose memory is not known here.")
    return {**_DEFAULTS.get(str(config.get("model_type")), {}), **config}


def _whole(config: Config, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise ShapeError(f"{names[0]} in config.json must be a whole number above 0.")
    if default is None:
        raise ShapeError(f"config.json has no {names[0]}: is it the config.json of a language model?")
    return default


def _count(config: Config, name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _windows(config: Config, layers: int, model_type: str) -> tuple[int | None, ...]:
    """Return for each layer how far it looks back: by layer_types, else by the pattern of the model's kind."""
    window = _count(config, "sliding_window") or None
    if isinstance(kinds := config.get("layer_types"), list) and len(kinds) == layers:
        kept = {"sliding_attention": window, "linear_attention": 0, "chunked_attention": None}
        return tuple(kept.get(str(kind)) for kind in kinds)
    if interval := _count(config, "full_attention_interval"):
        return tuple(None if (layer + 1) % interval == 0 else 0 for layer in range(layers))
    if window is None or config.get("use_sliding_window") is False:
        return (None,) * layers
    if pattern := _count(config, "sliding_window_pattern") or _count(config, "_sliding_window_pattern"):
        return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(layers))
    # The first layers of Qwen2 are full, the rest look back.
    first = _count(config, "max_window_layers") if model_type.startswith("qwen") else 0
    return tuple(window if layer >= first else None for layer in range(layers))


def _latent(config: Config) -> Latent | None:
    rank = _count(config, "kv_lora_rank")
    if not rank:
        return None
    names = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rope, nope, value = (_whole(config, name) for name in names)
    return Latent(rank, rope, _count(config, "q_lora_rank"), nope, value)


def _experts(config: Config, layers: int, model_type: str) -> Experts | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count = next((found for name in names if (found := _count(config, name))), 0)
    if count < 2:
        return None
    width = _count(config, "moe_intermediate_size") or _whole(config, "intermediate_size")
    shared = _count(config, "shared_expert_intermediate_size") or _count(config, "n_shared_experts") * width
    dense = set(range(_count(config, "first_k_dense_replace")))
    alone = config.get("mlp_only_layers")
    dense |= set(alone) if isinstance(alone, list) else set()
    step = _count(config, "decoder_sparse_step") or _count(config, "moe_layer_freq") or 1
    sparse = sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
    per_token = _count(config, "num_experts_per_tok") or _count(config, "experts_per_token") or 2
    biased = model_type == "gpt_oss"
    return Experts(count, per_token, width, shared, sparse, biased)


def _vision(config: object) -> int:
    """Return roughly how many parameters the image encoder has, 0 without one."""
    if not isinstance(config, Mapping):
        return 0
    width = _count(config, "hidden_size") or _count(config, "embed_dim")
    depth = _count(config, "num_hidden_layers") or _count(config, "depth")
    return depth * (4 * width * width + 2 * width * (_count(config, "intermediate_size") or 4 * width))


def _native(config: Config, model_type: str) -> int:
    """Return the longest context, as vLLM 0.32 derives it: scaled kinds have a length that is scaled already."""
    length = _whole(config, "max_position_embeddings", "n_positions", "max_sequence_length", default=2048)
    rope = _rope(config)
    factor = rope.get("factor")
    scaled = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
    if isinstance(factor, int | float) and "gemma3" not in model_type and rope_type(rope) not in scaled:
        return int(length * factor)
    return length


def _rope(config: Config) -> Config:
    """Return the rotary parameters in their present form, `rope_theta` among them."""
    told = config.get("rope_parameters") or config.get("rope_scaling")
    rope = dict(told) if isinstance(told, Mapping) else {}
    theta = config.get("rope_theta")
    return {"rope_theta": theta, **rope} if isinstance(theta, int | float) else rope


def rope_type(rope: Config) -> str:
    """Return how positions are scaled; "nested" where that differs by layer."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return "nested"
    return str(rope.get("rope_type") or rope.get("type") or "default")
