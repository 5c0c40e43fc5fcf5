"""docs/metrics.md names every metric, with its labels, and no other; the dashboard queries only existing ones."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trioengine import EngineConfig
from trioengine.actors.engine import Engine
from trioengine.serve.server import Server

DOCS = Path(__file__).parents[2] / "docs"
PREFIX = "trioengine_"


@pytest.fixture
def families():
    return families_of(Server(Engine(EngineConfig(model="toy"))))


def families_of(server):
    return list(text_string_to_metric_families(server.metrics.render().decode()))


def test_the_page_names_the_metrics_of_the_process():
    server = Server(Engine(EngineConfig(model="toy")))
    server.metrics.add_process()
    names = {family.name + "_total" * (family.type == "counter") for family in families_of(server)}
    of_process = {name for name in names if not name.startswith(PREFIX)}
    assert set(re.findall(r"`(process_\w+)`", (DOCS / "metrics.md").read_text())) == of_process != set()


def test_the_page_is_complete(families):
    rows = re.findall(r"^\| `(\w+)(?:\{(\w+)\})?` \| [^|]+ \| ", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    documented = {PREFIX + name: label for name, label in rows}
    assert len(documented) == len(rows)
    expected = {}
    for family in families:
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = family.name + "_total" * (family.type == "counter")
        expected[name] = "".join(labels)
    assert documented == expected


def test_names_and_help_follow_the_rules_of_promtool(families):
    """The rules of `promtool check metrics` for this format."""
    for family in families:
        suffixes = ("_total", "_count", "_sum", "_bucket", "_info", "_created")
        assert not family.name.endswith(suffixes), "for samples of counters and histograms"
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name)
        assert not {"counter", "gauge", "histogram", "summary"} & set(family.name.split("_"))
        assert not {"ms", "milliseconds", "minutes", "hours", "kb", "mb", "gb"} & set(family.name.split("_"))
        assert family.documentation


def test_the_page_names_every_value_of_a_label(families):
    page = (DOCS / "metrics.md").read_text()
    values = [v for family in families for s in family.samples for k, v in s.labels.items() if k != "le"]
    assert len(values) == 5 + 8 + 3
    assert [value for value in values if f"`{value}`" not in page] == []


def test_the_dashboard_queries_exactly_the_existing_metrics(families):
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert all(query.count("(") == query.count(")") for query in queries)
    variables = [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]
    used = {name for query in queries + variables for name in re.findall(rf"{PREFIX}\w+", query)}
    existing = {sample.name: family.name for family in families for sample in family.samples}
    assert used <= existing.keys()
    assert {existing[name] for name in used} == set(existing.values())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
