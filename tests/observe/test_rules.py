"""The alerts and the dashboard: promtool checks and tests the rules, and every name in them is one of the table's."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import yaml
from servers.prometheus import promtool
from test_docs import ROOT

from batchqueue_async.observe.table import METRICS

DEPLOY = ROOT / "examples" / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yaml"
PAGE = ROOT / "docs" / "how-to" / "alerts.md"
PANELS = [
    (panel["title"], target["expr"])
    for panel in json.loads((DEPLOY / "grafana" / "batchqueue.json").read_text())["panels"]
    for target in panel.get("targets", ())
]


def rules():
    return yaml.safe_load(RULES.read_text())["groups"][0]["rules"]


@pytest.mark.parametrize("arguments", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")])
def test_promtool_accepts_the_rules_and_their_tests_pass(arguments):
    done = subprocess.run(
        [promtool(), *arguments], cwd=RULES.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def series_names():
    names = set()
    for metric in METRICS:
        parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {metric.name + part for part in parts}
    return names


@pytest.mark.parametrize(("title", "expression"), [*((rule["alert"], rule["expr"]) for rule in rules()), *PANELS])
def test_every_metric_that_is_asked_for_exists_with_its_labels(title, expression):
    asked = re.findall(r"batchqueue_\w+", expression)
    assert asked
    assert [name for name in asked if name not in series_names()] == []
    labels = {label for metric in METRICS for label in metric.labels} | {"job", "instance", "le"}
    assert set(re.findall(r"(\w+)(?:=~|!=|=)\"", expression)) <= labels


def test_each_alert_has_a_test_a_severity_and_a_section_that_answers_it():
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") for heading in headings}
    tested = {
        each["alertname"]
        for test in yaml.safe_load((RULES.parent / "alerts_test.yaml").read_text())["tests"]
        for each in test["alert_rule_test"]
        if each["exp_alerts"]
    }
    for rule in rules():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["runbook_url"].partition("#")[2] in anchors
        assert f"`{rule['alert']}`" in PAGE.read_text()
        assert rule["alert"] in tested
    assert len(rules()) == len(anchors)


def test_the_dashboard_is_one_that_grafana_can_load():
    board = json.loads((DEPLOY / "grafana" / "batchqueue.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert [each["name"] for each in board["templating"]["list"]] == ["datasource", "job", "instance", "exporter"]
    cells = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns = range(place["x"], place["x"] + place["w"])
        mine = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & mine, panel["title"]
        cells |= mine
