"""What the demo says of a machine that cannot run vLLM."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.demo.needs import Machine, Missing, check_disk, lacking, this_machine

GOOD = Machine(
    system="Linux",
    architecture="x86_64",
    libc="glibc",
    libc_version=(2, 36),
    cpu_flags=frozenset({"sse2", "avx2"}),
    has_libnuma=True,
    has_ensurepip=True,
    memory_bytes=8 * 1024**3,
)


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ({"system": "Darwin"}, "needs Linux"),
        ({"architecture": "riscv64"}, "riscv64"),
        ({"libc": ""}, "glibc"),
        ({"libc_version": (2, 17)}, "2.28"),
        ({"cpu_flags": frozenset({"sse2"})}, "AVX2"),
        ({"has_libnuma": False}, "libnuma1"),
        ({"has_ensurepip": False}, "python3-venv"),
        ({"memory_bytes": 1024**3}, "1.0 GiB"),
    ],
)
def test_what_is_missing_is_named(difference: dict[str, Any], words: str) -> None:
    """
    Each lack is one sentence that names it.
    """
    sentence = lacking(replace(GOOD, **difference))
    assert sentence is not None
    assert words in sentence
    assert sentence.endswith((".", ")."))


@pytest.mark.parametrize(
    "difference",
    [
        {},
        {"architecture": "aarch64", "cpu_flags": frozenset()},
        {"memory_bytes": None},
        {"libc_version": (2, 28)},
        {"cpu_flags": frozenset()},  # not known
    ],
)
def test_a_machine_that_can_is_not_refused(difference: dict[str, Any]) -> None:
    """
    ARM needs no AVX2, and what cannot be found out is not held against a machine.
    """
    assert lacking(replace(GOOD, **difference)) is None


def test_this_machine_is_looked_at_without_an_error() -> None:
    """
    Whatever files this system has or lacks, the facts come out typed.
    """
    machine = this_machine()
    assert machine.system
    assert machine.memory_bytes is None or machine.memory_bytes > 0


def test_a_full_disk_is_told_before_anything_is_made(tmp_path: Path) -> None:
    """
    The folder need not exist yet: its nearest parent is what counts, and nothing is created.
    """
    folder = tmp_path / "not" / "there"
    check_disk(folder, 1)
    with pytest.raises(Missing, match="GiB free"):
        check_disk(folder, 1 << 62)
    assert not folder.parent.exists()
