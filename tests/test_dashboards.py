"""Dashboard and alerts ask only for what is there, and each alert says what to do."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from proxy.metrics import Metrics
from tests.fake_metrics import NAMES
from tests.prometheus import CONFIG, DASHBOARD, GPU_NAMES, RULES, alerts, dashboard_queries, filled_in, panels
from tests.prometheus import rule_queries as rules

ROOT = Path(__file__).parent.parent
WORDS = re.compile(r"\b(?:proxy_|vllm:|process_|DCGM_)\w+")
RECORDED = re.compile(r"\bpair:\w+:\w+")


def known() -> set[str]:
    """Return every name that proxy, vLLM and dcgm-exporter tell."""
    own = {
        f"{family.name}_total" if family.type == "counter" else family.name for family in Metrics().registry.collect()
    }
    return own | NAMES | GPU_NAMES


def names(query: str) -> set[str]:
    """Return the names of metrics in a query, without what a histogram appends."""
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in WORDS.findall(RECORDED.sub("", query))}


@pytest.mark.parametrize(("name", "query"), [*dashboard_queries(), *rules()], ids=lambda text: text[:60])
def test_a_query_names_only_metrics_that_exist(name: str, query: str) -> None:
    """Those of vLLM are what the fake tells, whose names are vLLM's own."""
    assert names(query) <= known()
    assert names(query) or "up{" in query or RECORDED.search(query)


def test_the_dashboard_is_laid_out_and_takes_any_prometheus() -> None:
    """No two panels overlap, none has an id twice, and the data source is a variable."""
    board = json.loads(DASHBOARD.read_text())
    places = [each["gridPos"] for each in board["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"])
    assert {each["datasource"]["uid"] for each in panels()} == {"${datasource}"}


def test_every_alert_has_a_line_that_says_what_to_do() -> None:
    """deploy/README.md has a row for each, and for no other."""
    told = set(re.findall(r"^\| `(\w+)` \|", section("## Alerts"), re.MULTILINE))
    assert told == alerts()


def section(heading: str) -> str:
    """Return a section of deploy/README.md."""
    return (ROOT / "deploy" / "README.md").read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_takes_configuration_rules_and_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """As Prometheus itself would read them."""
    for command in (("check", "config", CONFIG), ("check", "rules", RULES)):
        subprocess.run(["promtool", *command], check=True, capture_output=True)
    lines = [f"      - record: a:b\n        expr: '{filled_in(query, '5m')}'\n" for _, query in dashboard_queries()]
    lines = [line.replace("record: a:b", f"record: a:b{number}") for number, line in enumerate(lines)]
    (tmp_path / "board.yml").write_text("groups:\n  - name: board\n    rules:\n" + "".join(lines))
    subprocess.run(["promtool", "check", "rules", tmp_path / "board.yml"], check=True, capture_output=True)
