"""Running installers for the demo: what they say is kept, what they mean is told."""

import sys
import zipfile
from pathlib import Path

import pytest

from proxy.demo.needs import Missing
from proxy.demo.pip import explain, requirements, run

METADATA = """\
Metadata-Version: 2.1
Name: engine
Version: 1.0
Requires-Dist: numpy
Requires-Dist: torch==2.13.0; platform_machine == "x86_64"
Requires-Dist: torch_audio>=1
Requires-Dist: fastapi[standard]<1,>=0.1
Requires-Dist: boto3; extra == "s3"

Requires-Dist: this is the description, not a requirement
"""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["WARNING: Retrying after NewConnectionError", "ERROR: No matching distribution found for x"], "a network"),
        (["npm error code ENOTFOUND"], "a network"),
        (["ERROR: Could not install packages: [Errno 28] No space left on device"], "disk is full"),
        (["ERROR: No matching distribution found for torch==2.13.0"], "no build of torch==2.13.0 for Python 3."),
        (["Collecting x", "ERROR: a hash is wrong", "the end"], "pip failed: ERROR: a hash is wrong"),
        ([], "pip failed"),
    ],
)
def test_a_failure_is_one_sentence_with_the_log(lines: list[str], words: str) -> None:
    """
    The cause comes before its consequence: without a network pip also finds no distribution.
    """
    sentence = explain("pip", lines, Path("/somewhere/setup.log"))
    assert words in sentence
    assert "/somewhere/setup.log" in sentence
    assert "\n" not in sentence


def test_the_requirements_of_a_wheel_come_without_extras_and_what_is_left_out(tmp_path: Path) -> None:
    """
    Markers and extras of requirements stay: pip decides about them.
    """
    wheel = tmp_path / "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("engine-1.0.dist-info/METADATA", METADATA)
    assert requirements(wheel, frozenset({"torch", "torch-audio"})) == ["numpy", "fastapi[standard]<1,>=0.1"]
    assert len(requirements(wheel, frozenset())) == 4


def test_every_line_of_an_installer_is_told_and_logged(tmp_path: Path) -> None:
    """
    Both streams arrive in order while the installer runs.
    """
    log = tmp_path / "log"
    told: list[str] = []
    run((sys.executable, "-c", "import sys; print('one'); print('two', file=sys.stderr)"), log, told.append)
    assert told == ["one", "two"]
    assert log.read_text() == "one\ntwo\n"


def test_an_installer_that_fails_raises_what_is_missing(tmp_path: Path) -> None:
    """
    The exit code decides, the output explains.
    """
    with pytest.raises(Missing, match="ERROR: broken"):
        run((sys.executable, "-c", "print('ERROR: broken'); raise SystemExit(1)"), tmp_path / "log", lambda _line: None)


def test_an_installer_that_is_not_there_is_named(tmp_path: Path) -> None:
    """
    A machine without npm is told so.
    """
    with pytest.raises(Missing, match="The command no-such-npm is missing"):
        run(("no-such-npm", "pack"), tmp_path / "log", lambda _line: None)


def test_an_installer_ends_with_us(tmp_path: Path) -> None:
    """
    When we are interrupted while it writes, it does not go on in the background.
    """
    late = tmp_path / "late"
    script = f"import time; print('begun', flush=True); time.sleep(60); open({str(late)!r}, 'w')"

    def interrupt(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run((sys.executable, "-c", script), tmp_path / "log", interrupt)
    assert not late.exists()
