"""The rules for Prometheus and the dashboard in deploy/: they name real metrics, and fire when they should."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
RULES = DEPLOY / "prometheus" / "rankwatch.rules.yml"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "info": ("_info",), "histogram": ("_bucket", "_sum", "_count")}

no_promtool = shutil.which("promtool") is None
needs_promtool = pytest.mark.skipif(no_promtool, reason="promtool is not installed (Debian: prometheus)")


def samples() -> set[str]:
    """Names of the samples of all metrics, by the table that test_operations.py compares with the real page."""
    rows = re.findall(r"^\| `(rankwatch_\w+)`[^|]*\| (\w+) \|", OPERATIONS, re.MULTILINE)
    return {name + suffix for name, kind in rows for suffix in SUFFIXES[kind]}


def expressions() -> list[str]:
    """Every query of the rules and of the dashboard."""
    dashboard = json.loads((DEPLOY / "grafana" / "rankwatch.json").read_text())
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return rules + [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("expression", expressions())
def test_a_query_names_metrics_that_exist(expression):
    named = set(re.findall(r"rankwatch_\w+", expression))
    assert named <= samples()
    assert named or expression == "vector(1)"


def promtool(*arguments: str) -> tuple[int, str]:
    """Its exit status and output."""
    ran = subprocess.run(["promtool", *arguments], check=False, capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


@needs_promtool
def test_the_rules_fire_when_they_should_and_not_before():
    status, said = promtool("test", "rules", str(RULES.with_name("rankwatch.rules.test.yml")))
    assert status == 0, said


@needs_promtool
def test_every_query_is_promql(tmp_path):
    rules = [{"record": f"query:{number}", "expr": expression} for number, expression in enumerate(expressions())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    status, said = promtool("check", "rules", str(file))
    assert status == 0, said


def test_the_panels_of_the_dashboard_do_not_overlap():
    panels = json.loads((DEPLOY / "grafana" / "rankwatch.json").read_text())["panels"]
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
