"""Builds Orchard's Grafana dashboard, orchard_dashboard.json, from the metrics of the catalog.

The form is that of Ray's dashboards (schema version 27, one hidden variable for the data source), so that it works in a
Grafana that Ray configures, whose only data source is a Prometheus; the charts are of the type `timeseries`, which
Grafana has since version 8.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deployments.metrics.panels import Panel, Row, Style, rows
from deployments.metrics.promql import INSTANCE

UID = "orchard"
"""Identifies the dashboard in Grafana: its address is /d/orchard."""

TITLE = "Orchard"

FILE = Path(__file__).parent / "orchard_dashboard.json"

COMMAND = "uv run python -m deployments.metrics.dashboard"

SCHEMA_VERSION = 27
DATASOURCE = "${datasource}"
GRID_WIDTH, WIDTH, HEIGHT = 24, 12, 8
"""In units of Grafana's grid."""

EXISTS = "vllm:num_requests_running"
"""A metric of each engine, for the values of the variables."""

_FILL: dict[Style, int] = {"line": 0, "area": 15, "stack": 40, "bars": 60}
"""Opacity under a curve in percent."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana reads it."""
    return {
        "uid": UID,
        "title": TITLE,
        "description": f"Written by `{COMMAND} --write`.",
        "tags": ["orchard"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # the cursor is shown in all charts
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "templating": {"list": [_datasource(), _variable("model", "Model", "model_name"), _node()]},
        "panels": list(_placed(rows())),
    }


def text() -> str:
    """Return the dashboard as the file contains it."""
    return json.dumps(dashboard(), indent=1) + "\n"


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the expression of each query of a Grafana dashboard, also of collapsed rows."""
    for panel in dashboard.get("panels", ()):
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
        yield from queries(panel)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the dashboard, or write it to orchard_dashboard.json."""
    parser = argparse.ArgumentParser(COMMAND.removeprefix("uv run "), description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write it to {FILE.name} instead of printing it")
    if parser.parse_args(argv).write:
        FILE.write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "hide": 2,  # label and value
        "refresh": 1,
        "current": {"selected": False},
    }


def _node() -> dict[str, Any]:
    return {**_variable("node", "Node", INSTANCE), "multi": True}


def _variable(name: str, label: str, of: str) -> dict[str, Any]:
    """Return a variable with the values of a label of Prometheus."""
    query = f"label_values({EXISTS}, {of})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,  # when the range of time changes
        "sort": 1,
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": False,
        "current": {"selected": True, "text": "All", "value": "$__all"},
    }


def _placed(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the panels from top to bottom, two beside each other under the heading of their row."""
    y = number = 0
    for row in rows:
        number += 1
        heading = {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": row.is_collapsed,
            "gridPos": {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1},
            "panels": [],
        }
        y += 1
        placed = []
        for i, panel in enumerate(row.panels):
            number += 1
            down, right = divmod(i, GRID_WIDTH // WIDTH)
            position = {"x": right * WIDTH, "y": y + down * HEIGHT, "w": WIDTH, "h": HEIGHT}
            placed.append({"id": number, "gridPos": position, **_panel(panel)})
        if row.is_collapsed:
            yield {**heading, "panels": placed}
            continue
        y += -(-len(placed) * WIDTH // GRID_WIDTH) * HEIGHT
        yield heading
        yield from placed


def _panel(panel: Panel) -> dict[str, Any]:
    chart = _total(panel) if panel.style == "total" else _timeseries(panel)
    return {
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        **chart,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "expr": query.expr,
                "legendFormat": query.legend,
                **({"instant": True, "range": False} if panel.style == "total" else {}),
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def _timeseries(panel: Panel) -> dict[str, Any]:
    custom = {
        "drawStyle": "bars" if panel.style == "bars" else "line",
        "fillOpacity": _FILL[panel.style],
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.style in ("stack", "bars") else "none", "group": "A"},
    }
    return {
        "type": "timeseries",
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _total(panel: Panel) -> dict[str, Any]:
    return {
        "type": "bargauge",
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "decimals": 0}, "overrides": []},
        "options": {
            "displayMode": "basic",
            "orientation": "horizontal",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


if __name__ == "__main__":
    main()
