"""A pasted command line of vLLM: what old guides recommend is named with what does it today."""

import pytest

from proxy.doctor.flag_names import FLAGS
from proxy.doctor.flags import MYTHS, OLD_FLAGS, judge_flags, parse

GOOD = (
    "vllm serve Qwen/Qwen2.5-7B-Instruct --uds /run/vllm.sock --enable-prefix-caching --enable-prompt-tokens-details "
    "--enable-auto-tool-choice --tool-call-parser hermes --scheduling-policy priority --max-num-queued-reqs 200 "
    "--shutdown-timeout 30 --max-model-len 32768 --hf-overrides '{\"rope_parameters\": {}}'"
)


def mended(text: str) -> dict[str, str]:
    """Return what mends it, by check, of all that is to be mended."""
    return {each.check: each.mend for each in judge_flags(text) if each.state == "mend"}


def test_a_good_command_line_has_nothing_to_mend_and_nothing_to_note() -> None:
    assert [each.state for each in judge_flags(GOOD)] == ["well"]


@pytest.mark.parametrize("name", OLD_FLAGS)
def test_every_flag_of_old_guides_is_gone_from_vllm_and_is_told_with_what_to_do(name: str) -> None:
    """Also with an underscore or a value after an equals sign."""
    assert name not in FLAGS
    assert mended(f"{GOOD} --{name} 0.1") == {f"--{name}": OLD_FLAGS[name][1]}
    assert mended(f"{GOOD} --{name.replace('-', '_')}=0.1") == {f"--{name}": OLD_FLAGS[name][1]}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("scheduler=multistage", "scheduler=multistage"),
        ("cache_root: /var/cache", "cache_root"),
        ("engine.clear_cache()", "engine.clear_cache()"),
        ('{"guided_json": {}}', "guided_* fields"),
        ("batch_wait_window=50", "a waiting window to build batches"),
        ("PagedAttention: true", "PagedAttention as a switch"),
        ("SESSION_TIMEOUT=1800", "a session timeout in Open WebUI's configuration"),
    ],
)
def test_myths_in_configurations_are_told_with_what_to_do(text: str, name: str) -> None:
    assert name in {name for _, name, _, _ in MYTHS}
    assert list(mended(f"{GOOD} # {text}")) == [name]


def test_what_pairs_with_the_prefix_cache_is_asked_for() -> None:
    """A bare command lacks it; each missing thing is named with its flag."""
    found = mended("vllm serve m --host 127.0.0.1")
    assert found["prompt tokens details"] == "--enable-prompt-tokens-details"
    assert found["tool parser"].startswith("--enable-auto-tool-choice --tool-call-parser")
    assert len(found) == 2


def test_flags_that_cost_the_cache_are_told() -> None:
    text = f"{GOOD} --no-enable-prefix-caching --exclude-tools-when-tool-choice-none --block-size 128"
    assert list(mended(text)) == ["prefix caching", "tools of tasks", "block size"]


def test_a_misspelt_flag_is_told_with_the_one_that_was_meant() -> None:
    found = mended(f"{GOOD} --enable-prefix-cachin")
    assert found == {"--enable-prefix-cachin": "--enable-prefix-caching, if that was meant"}


def test_an_open_address_is_to_be_mended_and_a_containers_is_a_note() -> None:
    """Nothing guards /invocations, whatever key there is."""
    assert "open endpoints" in mended("vllm serve m --host 0.0.0.0 --api-key x")
    assert "open endpoints" in mended("vllm serve m")
    container = judge_flags("docker run -p 8000:8000 --gpus all vllm/vllm-openai:v0.32.0 --model m")
    assert [each.state for each in container if each.check == "open endpoints"] == ["note"]


def test_only_vllms_own_flags_are_read_over_several_lines() -> None:
    """What stands before the image is docker's; negative numbers are values; one dash is another kind of flag."""
    line = parse(["docker", "run", "--swap-space", "vllm/vllm-openai", "--max_model_len", "-1", "-tp", "2", "--seed=1"])
    assert line.contained and dict(line.flags) == {"max-model-len": "-1", "seed": "1"}
    assert "command line" not in mended("vllm serve m \\\n  --uds x \\\n  --enable-prompt-tokens-details")


@pytest.mark.parametrize("text", ["vllm serve 'm", "hello", ""])
def test_a_text_that_is_no_command_line_could_not_be_checked(text: str) -> None:
    assert [each.state for each in judge_flags(text)] == ["failed"]
