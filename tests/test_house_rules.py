"""The rules of the house, where a machine can keep them: purity, sizes, reasons, and documents that are not stale."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.app import build_app
from proxy.commands import COMMANDS
from proxy.config import Config
from proxy.metrics import Metrics

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "proxy").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_MODULE_LINES = 300
MAX_FUNCTION_LINES = 40
IMPURE = {"asyncio", "time", "random", "os", "logging", "sqlite3", "socket", "aiohttp"}
SPAWNS = {"create_task", "ensure_future", "run_coroutine_threadsafe"}
MUTABLE = {"dict", "list", "set", "defaultdict", "deque", "OrderedDict", "Counter", "bytearray", "WeakValueDictionary"}
CHANGES = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}
# Modules, or folders of them, whose tests have another name than theirs: which that is, and why.
TESTED_ELSEWHERE = {
    "proxy/aio.py": "test_app.py",  # a task has no life without an app
    "proxy/coalesce_metrics.py": "test_flight.py",  # each is counted where it happens
    "proxy/commands/keys.py": "test_commands.py",  # one line of output
    "proxy/config/": "test_config.py",  # one subject: a setting from its declaration to its error message
    "proxy/core/last_prompt.py": "test_prefix.py",  # what is kept shows in what is predicted from it
    "proxy/core/masked.py": "test_prefix.py",  # two functions of a line
    "proxy/core/past.py": "test_prefix.py",  # a bounded list
    "proxy/core/prints.py": "test_prefix.py",  # what two fingerprints say is where texts part
    "proxy/core/template_cases.py": "test_template_check.py",  # conversations
    "proxy/core/template_cause.py": "test_template_check.py",  # each cause is a verdict of the check
    "proxy/core/reject.py": "test_errors.py",  # a value; what matters is the answer made of it
    "proxy/demo/pins.py": "test_demo_recipe.py",  # constants
    "proxy/doctor/flag_names.py": "test_doctor_flags.py",  # names
    "proxy/doctor/server.py": "test_doctor_vllm_checks.py",  # values
    "proxy/doctor/sockets.py": "test_doctor_looking.py",  # what is seen over a socket
    "proxy/doctor/webui_checks.py": "test_doctor_webui.py",  # what is said of what was read
    "proxy/downstream/failures.py": "test_relay_failures.py",  # what a client sees of them
    "proxy/downstream/shared.py": "test_flight.py",  # the run and those who share it show together
    "proxy/downstream/sharer.py": "test_flight.py",
    "proxy/offline.py": "test_explain.py",  # what the command prints
    "proxy/restart_metrics.py": "test_upkeep.py",  # counted where a restart happens
    "proxy/state.py": "test_app.py",  # a record without behaviour
    "proxy/store/files.py": "test_store_faults.py",  # what the file goes through
    "proxy/store/keeper.py": "test_store_faults.py",  # what opens the file again when it can be used
    "proxy/store/pending.py": "test_store_sessions.py",  # the queue shows in what is on disk and when
    "proxy/store/rows.py": "test_store_sessions.py",  # values
}


def name_of(path: Path) -> str:
    """Return a module's path as people write it."""
    return path.relative_to(ROOT).as_posix()


def every_module(paths: list[Path] = MODULES) -> pytest.MarkDecorator:
    """Run a test once for each module, under its name."""
    return pytest.mark.parametrize("path", paths, ids=name_of)


def imported(tree: ast.Module) -> set[str]:
    """Return the top-level packages that a module imports, anywhere in it."""
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in names}


@every_module([path for path in MODULES if name_of(path).startswith("proxy/core/")])
def test_the_core_takes_values_and_does_no_io(path: Path) -> None:
    """The core imports nothing that waits, reads a clock, throws dice, logs or reaches out."""
    assert imported(ast.parse(path.read_text())) & IMPURE == set()


@every_module([path for path in MODULES if name_of(path).startswith("proxy/core/")])
def test_the_core_imports_only_the_core(path: Path) -> None:
    """Values point inwards: the shell knows the core, never the other way round."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    inner = [node.module for node in nodes if node.module and node.module.split(".")[0] == "proxy"]
    assert [module for module in inner if not module.startswith("proxy.core")] == []


@every_module()
def test_a_module_has_fewer_than_300_lines(path: Path) -> None:
    """Longer ones hold two things."""
    assert len(path.read_text().splitlines()) < MAX_MODULE_LINES


@every_module()
def test_a_function_has_fewer_than_40_lines(path: Path) -> None:
    """Longer ones do two things."""
    functions = [
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {each.name: (each.end_lineno or 0) - each.lineno + 1 for each in functions}
    assert {name: lines for name, lines in long.items() if lines >= MAX_FUNCTION_LINES} == {}


@every_module([path for path in MODULES if path.name not in ("__init__.py", "__main__.py")])
def test_a_module_has_its_test_file(path: Path) -> None:
    """`proxy/a/b.py` is tested in `test_b.py`, `test_b_*.py` or `test_a_b.py`, or in what the table above names."""
    stem = "_".join(path.relative_to(ROOT / "proxy").with_suffix("").parts)
    names = {test.name for test in TESTS}
    listed = [test for module, test in TESTED_ELSEWHERE.items() if name_of(path).startswith(module)]
    found = [name for name in names if re.fullmatch(rf"test_({path.stem}|{path.stem}_\w+|{stem})\.py", name)]
    assert found or names & set(listed)


def test_the_table_of_test_files_has_no_stale_lines() -> None:
    """Each module in it exists and has no file of its own; each test file in it exists."""
    for module, test in TESTED_ELSEWHERE.items():
        path = ROOT / module
        assert path.exists(), module
        assert (ROOT / "tests" / test).exists(), test
        assert path.is_dir() or not (ROOT / "tests" / f"test_{path.stem}.py").exists(), module


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@every_module(MODULES + TESTS)
def test_every_exception_to_a_rule_has_a_reason(path: Path) -> None:
    """`# noqa: CODE  reason` and `# type: ignore[code]  # reason`: a bare one says nothing to the next reader."""
    unreasoned = []
    for line, text in comments(path):
        bare = re.search(r"#\s*noqa(?!:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*\s+\S)", text)
        ignored = re.search(r"#\s*type:\s*ignore(?!\[[a-z-]+(,\s*[a-z-]+)*\]\s+\S)", text)
        unreasoned += [line] if bare or ignored else []
    assert unreasoned == []


@every_module([path for path in MODULES if name_of(path) != "proxy/aio.py"])
def test_only_one_module_creates_tasks(path: Path) -> None:
    """A task has a name, an owner and an end: `proxy.aio.Tasks.spawn`, also where a linter would not see it."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls]
    assert [name for name in names if name in SPAWNS] == []


def _holds_state(value: ast.expr | None) -> bool:
    """Say whether a value is made to be filled: an empty display, or a container made by a call."""
    if isinstance(value, ast.Dict | ast.List):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    func = value.func if isinstance(value, ast.Call) else None
    return (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")) in MUTABLE


def _globals(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield name and value of everything that a module's body assigns."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((ast.unparse(target), node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), node.value


def _changed(tree: ast.Module) -> set[str]:
    """Return the names that are changed in place somewhere in a module: by an item, or by a method that does so."""
    nodes = list(ast.walk(tree))
    items = [n.value for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store | ast.Del)]
    calls = [n.func for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return {ast.unparse(each) for each in [*items, *(call.value for call in calls if call.attr in CHANGES)]}


@every_module()
def test_no_module_keeps_state(path: Path) -> None:
    """State lives in SQLite, in the app's state or in a request: no globals that are filled and no `global`."""
    tree = ast.parse(path.read_text())
    kept = {name: value for name, value in _globals(tree) if name != "__all__"}
    assert [name for name, value in kept.items() if _holds_state(value)] == []
    assert kept.keys() & _changed(tree) == set()
    assert [node.names for node in ast.walk(tree) if isinstance(node, ast.Global)] == []


def test_every_test_says_in_a_sentence_what_holds() -> None:
    """By its docstring, or by a name of at least four words."""
    silent = []
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                said = ast.get_docstring(node) or node.name.count("_") >= 4
                silent += [] if said else [f"{path.name}: {node.name}"]
    assert silent == []


def test_every_public_thing_of_the_proxy_has_a_docstring() -> None:
    """Docstrings promise: what goes in and out, in which unit, and what is raised."""
    silent = []
    for path in MODULES:
        tree = ast.parse(path.read_text())
        if path.read_text().strip() and not ast.get_docstring(tree):
            silent.append(name_of(path))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                public = not node.name.startswith("_") and not ast.get_docstring(node)
                silent += [f"{name_of(path)}: {node.name}"] if public else []
    assert silent == []


def document(name: str) -> str:
    """Return the text of a document, "" if there is none."""
    path = ROOT / name
    return path.read_text() if path.exists() else ""


def test_every_metric_is_documented() -> None:
    """deploy/README.md names each metric as Prometheus shows it."""
    text = document("deploy/README.md")
    families = list(Metrics().registry.collect())
    names = [f"{family.name}_total" if family.type == "counter" else family.name for family in families]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_no_metric_is_documented_that_does_not_exist() -> None:
    """A name that was changed must not live on in the document."""
    families = list(Metrics().registry.collect())
    known = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    suffixes = "_bucket|_sum|_count"
    told = {
        re.sub(rf"({suffixes})$", "", name) for name in re.findall(r"\bproxy_[a-z_]+\b", document("deploy/README.md"))
    }
    assert told - known == set()


def test_every_route_is_documented() -> None:
    """README.md or proxy/README.md names each path that is served."""
    text = document("README.md") + document("proxy/README.md")
    paths = {resource.canonical for resource in build_app(Config()).router.resources()}
    assert [path for path in sorted(paths) if f"`{path}`" not in text and f" {path}`" not in text] == []


def test_every_command_is_documented() -> None:
    """README.md names each command as one types it."""
    text = document("README.md")
    assert [name for name in COMMANDS if f"prefix-proxy {name}" not in text] == []


def settings(group: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of every setting ("relay.keepalive_seconds"); client keys have a section of their own."""
    for each in fields(group):
        value = getattr(group, each.name)
        if is_dataclass(value):
            yield from settings(value, f"{prefix}{each.name}.")
        elif each.name != "keys":
            yield prefix + each.name


def test_every_setting_is_documented() -> None:
    """deploy/CONFIG.md names each setting."""
    text = document("deploy/CONFIG.md")
    assert [path for path in settings(Config()) if not re.search(rf"(?<![\w.]){re.escape(path)}(?![\w.])", text)] == []


def documents() -> list[Path]:
    """Return the Markdown files of the project, without those of tools and environments."""
    found = [
        path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]
    return [path for path in found if not {"node_modules", "build", "dist"} & set(path.parts)]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as the usual hosts make them."""
    headings = re.findall(r"^#+\s+(.+?)\s*$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_links_of_all_documents_resolve() -> None:
    """A relative link names a file that is there, and an anchor a heading."""
    broken = []
    for path in documents():
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (path.parent / target).resolve() if target else path
            missing = not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file))
            broken += [f"{name_of(path)}: {link}"] if missing else []
    assert broken == []
