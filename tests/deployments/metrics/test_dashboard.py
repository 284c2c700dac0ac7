"""Orchard's Grafana dashboard: current, and made of metrics that exist."""

import itertools
import json
import re
from typing import Any

import pytest
from ray.dashboard.modules.metrics.grafana_dashboard_factory import generate_serve_llm_grafana_dashboard

from deployments.metrics.catalog import METRICS
from deployments.metrics.dashboard import FILE, GRID_WIDTH, dashboard, main, queries, text
from deployments.metrics.panels import CHOSEN, rows
from deployments.metrics.promql import INSTANCE, increase, quantile, rate, share, value

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket",)}


def charts() -> list[dict[str, Any]]:
    """All panels but the headings, also those of collapsed rows."""
    panels = dashboard()["panels"]
    return [one for panel in panels for one in (panel, *panel.get("panels", ())) if one["type"] != "row"]


def test_the_file_is_that_of_the_catalog():
    assert FILE.read_text() == text(), "uv run python -m deployments.metrics.dashboard --write"


def test_the_command_prints_the_dashboard(capsys: pytest.CaptureFixture[str]):
    main([])
    assert capsys.readouterr().out == text()


def test_each_query_names_only_what_the_text_format_has():
    exported = {metric.name + suffix for metric in METRICS for suffix in SUFFIXES[metric.kind]}
    named = {name for _, expr in queries(dashboard()) for name in re.findall(r"(?:vllm|orchard):\w+", expr)}
    assert named <= exported


def test_each_metric_is_in_a_chart():
    shown = {
        metric.name for row in rows() for panel in row.panels for query in panel.queries for metric in query.metrics
    }
    assert shown == {metric.name for metric in METRICS}
    assert [row.title for row in CHOSEN] == ["Users", "Engine", "Cluster, by node", "Cost, by API key"]


def test_metric_of_another_kind_or_label_cannot_be_asked_for():
    with pytest.raises(KeyError):
        value("vllm:gpu_cache_usage_perc")
    with pytest.raises(AssertionError, match="is a gauge, not a counter"):
        rate("orchard:rows")
    with pytest.raises(AssertionError, match="has no label key"):
        increase("orchard:refusals", "key")


def test_queries_are_promql():
    chosen = '{model_name=~"$model", instance=~"$node"}'
    assert value("orchard:rows", "state").expr == f"sum by (state) (orchard:rows{chosen})"
    assert rate("vllm:prompt_tokens").expr == f"sum(rate(vllm:prompt_tokens_total{chosen}[$__rate_interval]))"
    both = share("vllm:prefix_cache_hits", "vllm:prefix_cache_queries")
    assert [metric.name for metric in both.metrics] == ["vllm:prefix_cache_hits", "vllm:prefix_cache_queries"]
    assert both.expr.endswith(f" / (sum(rate(vllm:prefix_cache_queries_total{chosen}[$__rate_interval])) > 0)")
    by_node = quantile("vllm:time_to_first_token_seconds", 95, INSTANCE)
    assert by_node.expr.startswith("histogram_quantile(0.95, sum by (le, instance) (rate(")
    assert by_node.legend == "p95 {{instance}}"


def test_panels_do_not_overlap_and_have_their_own_numbers():
    panels = dashboard()["panels"]
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for place in places
        for x, y in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < GRID_WIDTH
    numbers = [one["id"] for panel in panels for one in (panel, *panel.get("panels", ()))]
    assert len(numbers) == len(set(numbers))


def test_charts_say_what_they_show_and_ask_the_data_source_of_the_dashboard():
    for chart in charts():
        assert chart["datasource"] == "${datasource}" and "`: " in chart["description"], chart["title"]
        names = [target["refId"] for target in chart["targets"]]
        assert len(names) == len(set(names)) <= 26


def test_variables_are_those_of_the_queries():
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = {name for _, expr in queries(dashboard()) for name in re.findall(r"\$(?!__)(\w+)", expr)}
    assert used | {"datasource"} == variables


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # Ray does not close the file that it reads
def test_the_form_is_that_of_rays_dashboards():
    """Grafana reads the file beside Ray's."""
    ray, ours = json.loads(generate_serve_llm_grafana_dashboard()[0]), dashboard()
    assert ours["schemaVersion"] == ray["schemaVersion"] and ours["uid"] != ray["uid"]
    source = {variable["name"]: variable for variable in ray["templating"]["list"]}["datasource"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert {variable.get("datasource", "${datasource}") for variable in ours["templating"]["list"]} == {"${datasource}"}
