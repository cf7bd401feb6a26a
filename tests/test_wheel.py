"""What is shipped is what is tested: the built wheel, installed by itself, runs and opens its database."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPEN_DATABASE = """
import asyncio, sys, proxy
from proxy.store import open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        assert not store.degraded, "the SQL of the wheel was not found"

asyncio.run(main())
print(proxy.__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the checkout; return what it prints."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel; without a network where hatchling is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    run(*pip, *isolation, "--wheel-dir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment of its own that borrows this one's dependencies, not its checkout."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_the_wheel_holds_code_and_sql_and_no_tests(wheel: Path) -> None:
    """The numbered SQL of migrations/ is inside the package."""
    names = zipfile.ZipFile(wheel).namelist()
    sql = sorted(path.name for path in (ROOT / "migrations").glob("*.sql"))
    assert sql
    assert (
        sorted(Path(name).name for name in names if name.startswith("proxy/migrations/") and name.endswith(".sql"))
        == sql
    )
    assert [name for name in names if name.startswith(("tests/", "deploy/"))] == []
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "proxy/downstream/status.html" in names


def test_the_installed_command_finds_the_chat_templates(bin_folder: Path, tmp_path: Path) -> None:
    """By name, from within the package."""
    assert "Stable" in run(bin_folder / "prefix-proxy", "template", "check", "--file", "qwen3", cwd=tmp_path)


def test_the_installed_command_says_what_it_can_do(bin_folder: Path, tmp_path: Path) -> None:
    """`prefix-proxy --help` and `prefix-proxy config` run from the wheel."""
    assert "serve" in run(bin_folder / "prefix-proxy", "--help", cwd=tmp_path)
    assert "keepalive_seconds" in run(bin_folder / "prefix-proxy", "config", cwd=tmp_path)


def test_the_installed_package_opens_a_database_with_its_own_sql(bin_folder: Path, tmp_path: Path) -> None:
    """The migrations of the wheel are applied, not those of the checkout."""
    place = run(bin_folder / "python", "-c", OPEN_DATABASE, tmp_path / "sessions.sqlite3", cwd=tmp_path)
    assert str(bin_folder.parent) in place
    assert (tmp_path / "sessions.sqlite3").stat().st_size > 0
