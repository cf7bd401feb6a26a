"""The converter of SmolLM2's weights: names, order of rows, and the files beside the weights.

Its result is read by a real vLLM in the end-to-end tests; here is what can be said without torch.
"""

import json
from typing import Any

import pytest

from proxy.demo import smollm2

FACTS: dict[str, Any] = {
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
        ("blk.7.ffn_down.bias", "model.layers.7.mlp.down_proj.bias"),
    ],
)
def test_tensors_get_the_names_that_vllm_loads(theirs: str, ours: str) -> None:
    """
    llama.cpp's names on the left, transformers' on the right.
    """
    assert smollm2.tensor_name(theirs) == ours


def test_a_tensor_that_no_llama_model_has_is_refused() -> None:
    """
    A weight that would be lost in silence must not be.
    """
    with pytest.raises(KeyError):
        smollm2.tensor_name("blk.0.ssm_conv1d.weight")


def test_only_queries_and_keys_were_reordered() -> None:
    """
    Each by its own number of heads; without one for keys that of the queries holds.
    """
    assert smollm2.heads_of("blk.0.attn_q.weight", FACTS) == 9
    assert smollm2.heads_of("blk.0.attn_k.weight", FACTS) == 3
    assert smollm2.heads_of("blk.0.attn_k.weight", {"llama.attention.head_count": 9}) == 9
    assert smollm2.heads_of("blk.0.attn_v.weight", FACTS) is None
    assert smollm2.heads_of("blk.0.attn_output.weight", FACTS) is None


class Rows:
    """Just enough of an array: a flat list of rows, seen as heads, pairs and the two of a pair."""

    def __init__(self, rows: list[int], shape: tuple[int, ...]) -> None:
        self.rows = rows
        self.shape = shape

    def reshape(self, *shape: int) -> "Rows":
        """Look at the same rows in another shape; the last number is the columns."""
        return Rows(self.rows, shape)

    def swapaxes(self, first: int, second: int) -> "Rows":
        """Swap the pairs with the two of a pair."""
        assert (first, second) == (1, 2)
        heads, pairs, two, columns = self.shape
        at = [
            self.rows[head * pairs * two + pair * two + one]
            for head in range(heads)
            for one in range(two)
            for pair in range(pairs)
        ]
        return Rows(at, (heads, two, pairs, columns))


def test_the_two_rows_of_a_pair_go_into_different_halves() -> None:
    """
    Pairs 0 1, 2 3 of each head become 0 2, 1 3: first ones, then second ones.
    """
    result = smollm2.in_halves(Rows(list(range(8)), (8, 5)), 2)
    assert result.rows == [0, 2, 1, 3, 4, 6, 5, 7]
    assert result.shape == (8, 5)


def test_the_configuration_comes_from_the_file_and_is_json() -> None:
    """
    A 32-bit float of the file is written as the number that was meant.
    """
    config = json.loads(json.dumps(smollm2.model_config(FACTS, tied=True)))
    assert config["rms_norm_eps"] == 1e-05
    assert config["num_key_value_heads"] == 3
    assert config["head_dim"] == 64
    assert config["vocab_size"] == 4
    assert config["tie_word_embeddings"] is True
    assert config["pad_token_id"] == config["eos_token_id"] == 2


def test_the_tokenizer_keeps_the_template_and_its_own_special_tokens() -> None:
    """
    Without the chat template vLLM refuses every chat.
    """
    config = smollm2.tokenizer_config(FACTS)
    assert config["chat_template"] == "{{ messages }}"
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert config["add_bos_token"] is False
