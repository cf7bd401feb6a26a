"""What is said of a vLLM, value by value."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.chat_template import bundled, read_template
from proxy.doctor.finding import Finding, exit_code
from proxy.doctor.server import Server, Timed, cache_labels
from proxy.doctor.vllm_checks import judge_vllm, parser_for
from proxy.template_verdicts import check_file
from tests.toy_templates import TRIMS, toy

WELL = Server(
    "http://127.0.0.1:8000",
    model="Qwen2.5-7B",
    max_model_len=8192,
    version="0.32.0",
    cache={"block_size": "16", "enable_prefix_caching": "True", "kv_cache_size_tokens": "100000"},
    open_paths=("/metrics",),
    beyond_loopback=False,
    cold=Timed(600, 0, 2.5),
    warm=Timed(600, 592, 0.1),
    idle_seconds=5.0,
    watched_seconds=8.0,
    template=check_file(*read_template(bundled()["qwen3"])),
    tools_refused=False,
    tools_left_out=False,
)
LABELS = {"block_size": "128", "enable_prefix_caching": "False", "kv_cache_size_tokens": "9000"}


def of(server: Server, check: str) -> Finding:
    """Return the finding of one check."""
    return next(each for each in judge_vllm(server) if each.check == check)


def test_a_good_server_has_nothing_to_mend() -> None:
    found = judge_vllm(WELL)
    assert exit_code(found) == 0 and {each.state for each in found} == {"well", "note"}


@pytest.mark.parametrize(
    ("change", "check", "mend"),
    [
        ({"version": "0.9.1"}, "version", "a newer vLLM"),
        ({"cache": LABELS}, "prefix caching", "--enable-prefix-caching"),
        ({"cache": None, "warm": Timed(600, 0, 2.4)}, "prefix caching", "--enable-prefix-caching"),
        ({"warm": Timed(600, None, 0.1)}, "prompt tokens details", "--enable-prompt-tokens-details"),
        ({"cache": LABELS}, "block size", "--block-size 32"),
        ({"cache": LABELS}, "context", "--max-model-len"),
        ({"tools_refused": True}, "tool parser", "--enable-auto-tool-choice --tool-call-parser hermes"),
        ({"tools_left_out": True}, "tools of tasks", "leave --exclude-tools-when-tool-choice-none out"),
        ({"idle_seconds": 1.0}, "keep-alive", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5"),
        ({"beyond_loopback": True}, "open endpoints", "--uds PATH"),
        ({"developer_routes": True}, "developer routes", "VLLM_SERVER_DEV_MODE"),
        ({"template": check_file(toy(shape=TRIMS), {})}, "chat template", "deploy/chat_templates"),
    ],
)
def test_each_fault_is_told_with_what_mends_it(change: dict[str, Any], check: str, mend: str) -> None:
    found = of(replace(WELL, **change), check)
    assert found.state == "mend" and mend in found.mend and found.why


def test_the_cost_is_what_was_measured() -> None:
    """Without a cache, and with a template that wastes it."""
    assert "600 tokens took 2.50 s, once more 0.10 s" in of(replace(WELL, cache=LABELS), "prefix caching").says
    unstable = replace(WELL, template=check_file(toy(shape=TRIMS), {}), fitting=Path("/x/qwen3.jinja"))
    found = of(unstable, "chat template")
    assert "2.50 s" in found.why and found.mend == "--chat-template /x/qwen3.jinja"


@pytest.mark.parametrize(
    ("change", "check", "state"),
    [
        ({"version": None}, "version", "note"),
        ({"cache": None, "warm": None}, "prefix caching", "failed"),
        ({"warm": None}, "prompt tokens details", "failed"),
        ({"cache": None}, "block size", "note"),
        ({"template": None}, "chat template", "failed"),
        ({"tools_refused": None}, "tool parser", "note"),
        ({"max_model_len": None}, "context", "note"),
        ({"watched_seconds": 0.0}, "keep-alive", "note"),
        ({"idle_seconds": None}, "keep-alive", "well"),
        ({"open_paths": ()}, "open endpoints", "well"),
        ({"beyond_loopback": None}, "open endpoints", "note"),
        ({"policy": "priority"}, "scheduling policy", "well"),
        ({"policy": "fcfs"}, "scheduling policy", "note"),
    ],
)
def test_what_is_not_seen_is_said(change: dict[str, Any], check: str, state: str) -> None:
    assert of(replace(WELL, **change), check).state == state


def test_a_server_that_cannot_be_looked_at_is_one_finding() -> None:
    found = judge_vllm(Server("x", problem="vLLM cannot be reached\x1b."))
    assert [(each.state, each.says) for each in found] == [("failed", "vLLM cannot be reached?.")]
    assert "PREFIX_PROXY_UPSTREAM_API_KEY" in judge_vllm(Server("x", problem="No.", needs_key=True))[0].mend


def test_the_capacity_is_read_from_the_metrics_also_of_older_ones() -> None:
    text = 'x 1\nvllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10"} 1.0\n'
    assert Server("x", cache=cache_labels(text)).kv_tokens == 160
    assert cache_labels("vllm:other 1") is None and Server("x").kv_tokens is None


def test_a_parser_is_named_by_the_model_and_not_guessed() -> None:
    assert (parser_for("Qwen/Qwen3-8B"), parser_for("meta-llama/Llama-3.1-8B"), parser_for("x")) == (
        "hermes", "llama3_json", None,
    )  # fmt: skip
