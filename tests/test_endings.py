"""Why a vLLM ended, from what it left behind."""

import pytest

from proxy.core.endings import CAUSES, ending_of, pause_seconds

GPU = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
ENGINE = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."


@pytest.mark.parametrize(
    ("code", "lines", "cause"),
    [
        (1, ["INFO up", GPU, ENGINE, "Goodbye"], "gpu_memory"),
        (1, ["ValueError: No available memory for the cache blocks."], "gpu_memory"),
        (1, ["ValueError: 4.0 GiB KV cache is needed, which is larger than the available"], "gpu_memory"),
        (1, ["OSError: [Errno 12] Cannot allocate memory"], "host_memory"),
        (1, ["OSError: [Errno 98] Address already in use"], "address"),
        (2, ["vllm: error: unrecognized arguments: --swap-space 4"], "flags"),
        (1, ["OSError: m is not a local folder and is not a valid model identifier"], "model"),
        (1, ["INFO", ENGINE], "engine"),
        (-9, ["INFO up"], "killed"),
        (137, [], "killed"),
        (-11, ["Fatal Python error: Segmentation fault"], "crashed"),
        (-15, [], "stopped"),
        (0, [], "stopped"),
        (3, ["KeyError: x"], "other"),
        (3, [], "other"),
    ],
)
def test_the_cause_is_found_by_code_and_last_lines(code: int, lines: list[str], cause: str) -> None:
    """What follows from a cause, such as the engine's death, does not hide it."""
    found = ending_of(code, lines)
    assert found.cause == cause and cause in CAUSES
    assert found.sentence and "  " not in found.sentence


def test_the_line_that_tells_is_shown_without_control_signs() -> None:
    assert "x?[2J" in ending_of(3, ["KeyError: x\x1b[2J", "bye"]).told


def test_pauses_grow_to_a_minute() -> None:
    assert [pause_seconds(count) for count in (1, 2, 3, 7, 5000)] == [1, 2, 4, 60, 60]
