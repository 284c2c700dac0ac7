"""Draws a row of Orchard's dashboard from the data of a Prometheus, for those who have no Grafana at hand.

uv run --with matplotlib python -m tests.benchmarks.dashboard_figure OUT.png [--row Users] [--minutes 10]
"""

import argparse
import math
import re
import time
from pathlib import Path
from typing import Any

import httpx

from deployments.metrics.dashboard import dashboard

NUM_POINTS = 120
COLUMNS = 3
UNITS = {"s": "s", "bytes": "GiB", "percentunit": "share", "reqps": "per s", "short": ""}
SCALES = {"bytes": 2**30}
EVERY = re.compile(r"\$(model|node)\b")


def panels_of(row: str) -> list[dict[str, Any]]:
    """Return the charts under a heading of the dashboard."""
    found: list[dict[str, Any]] = []
    is_in_row = False
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            is_in_row = panel["title"] == row
            found += panel["panels"] if is_in_row else []
        elif is_in_row:
            found.append(panel)
    if not found:
        titles = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
        raise SystemExit(f"the dashboard has no row {row!r}; its rows are {', '.join(titles)}")
    return found


def series(client: httpx.Client, target: dict[str, Any], minutes: float, interval_s: int) -> list[Any]:
    """Return the name, the minutes and the values of each series of a query."""
    expr = EVERY.sub(".*", target["expr"])
    expr = expr.replace("$__rate_interval", f"{interval_s}s").replace("$__range", f"{math.ceil(minutes * 60)}s")
    now = time.time()
    asked = {"query": expr, "start": now - 60 * minutes, "end": now, "step": 60 * minutes / NUM_POINTS}
    answer = client.get("/api/v1/query_range", params=asked).raise_for_status().json()
    drawn = []
    for one in answer["data"]["result"]:
        name = target["legendFormat"]
        for label, value in one["metric"].items():
            name = name.replace(f"{{{{{label}}}}}", value)
        points = [((at - now) / 60, float(value)) for at, value in one["values"] if value != "NaN"]
        if points:
            drawn.append((name, *zip(*points, strict=True)))
    return drawn


def draw(client: httpx.Client, row: str, minutes: float, interval_s: int, path: Path) -> list[str]:
    """Write the charts of a row as a PNG; return the titles of those without data. Raises SystemExit if all are."""
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]  # uv run --with matplotlib

    panels = panels_of(row)
    num_rows = math.ceil(len(panels) / COLUMNS)
    figure, axes = pyplot.subplots(num_rows, COLUMNS, figsize=(6 * COLUMNS, 3 * num_rows), squeeze=False)
    for chart in axes.flat[len(panels) :]:
        chart.set_visible(False)
    empty: list[str] = []
    for chart, panel in zip(axes.flat, panels, strict=False):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        stacked = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
        drawn = [one for target in panel["targets"] for one in series(client, target, minutes, interval_s)]
        for name, at, values in drawn:
            scaled = [value / SCALES.get(unit, 1) for value in values]
            chart.plot(at, scaled, label=name, linewidth=1.2, linestyle="--" if stacked else "-")
        chart.set_title(panel["title"], fontsize=10)
        chart.set_ylabel(UNITS.get(unit, unit.removeprefix("suffix: ")), fontsize=8)
        chart.set_xlim(-minutes, 0)
        chart.set_ylim(bottom=0)
        chart.tick_params(labelsize=8)
        if not drawn:
            empty.append(panel["title"])
        else:
            chart.legend(fontsize=7, loc="upper left", ncols=1 + len(drawn) // 6)
    if len(empty) == len(panels):
        raise SystemExit(f"{client.base_url} has no data of the last {minutes:g} minutes for any chart of {row!r}")
    figure.supxlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return empty


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.benchmarks.dashboard_figure", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--row", default="Users", help="heading of the charts; default: Users")
    parser.add_argument("--minutes", type=float, default=10, help="time before now; default: 10")
    parser.add_argument("--interval", type=int, default=40, help="seconds over which rates are taken; default: 40")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    options = parser.parse_args()
    with httpx.Client(base_url=options.prometheus, timeout=30) as client:
        empty = draw(client, options.row, options.minutes, options.interval, options.out)
    print(options.out, *(f"no data: {title}" for title in empty), sep="\n")


if __name__ == "__main__":
    main()
