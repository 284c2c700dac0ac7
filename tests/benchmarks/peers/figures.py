"""Tables and plots of the comparison from its records."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Spread

RATE, MEDIAN, LAST = "tokens/s", "first token p50, ms", "first token last, ms"
HIGHER_IS_BETTER = frozenset({RATE})

FIGURES: Mapping[str, tuple[str, ...]] = {
    "text, 1": (RATE, MEDIAN),
    "text, 4": (RATE, LAST),
    "text, 8": (RATE, LAST),
    "text, 16": (RATE, MEDIAN, LAST),
    "text, 32": (RATE, MEDIAN, LAST),
    "images, 8": (RATE, MEDIAN),
    "text and images, 8": (RATE, MEDIAN),
    "tools, 4": (RATE, MEDIAN),
    "arrivals": (MEDIAN, LAST),
    "2,500 words": (MEDIAN,),
    "short behind 2,500 words": (MEDIAN,),
    "1k, first turn": (MEDIAN,),
    "1k, second turn": (MEDIAN,),
    "4k, first turn": (MEDIAN,),
    "4k, second turn": (MEDIAN,),
    "4 agents, later turns": (MEDIAN, LAST),
    "text, 16, a third leaves": (RATE,),
}
"""Scenario to the figures that its table shows."""


@dataclass(frozen=True)
class Row:
    """One figure of one scenario for each arm."""

    scenario: str
    figure: str
    spreads: Mapping[str, Spread]
    num_errors: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """Orchard's median against that of the best peer; above 1 Orchard is better. nan without a peer."""
        medians = [
            spread.median
            for arm, spread in self.spreads.items()
            if arm != "Orchard" and not math.isnan(spread.median) and not self.num_errors[arm]
        ]
        own = self.spreads["Orchard"].median if "Orchard" in self.spreads else math.nan
        if not medians or math.isnan(own):
            return math.nan
        return own / max(medians) if self.figure in HIGHER_IS_BETTER else min(medians) / own


def load(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of a checkpoint's folder: arm to the figures of all its rounds."""
    records: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/*/figures.jsonl")):
        records.setdefault(path.parent.parent.name, []).extend(map(json.loads, path.read_text().splitlines()))
    return records


def rows(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Row]:
    """Yield the rows of a table for which an arm has figures."""
    for scenario, names in FIGURES.items():
        found = {arm: [one for one in of_arm if one["scenario"] == scenario] for arm, of_arm in records.items()}
        num_errors = {arm: sum(len(one["errors"]) for one in of_arm) for arm, of_arm in found.items()}
        for name in names if any(found.values()) else ():
            spreads = {
                arm: Spread.of([one[name] for one in of_arm if not math.isnan(one[name])])
                for arm, of_arm in found.items()
            }
            yield Row(scenario, name, spreads, num_errors)


def markdown(of_rows: Sequence[Row], arms: Sequence[str]) -> str:
    """Return the table, one line per row; arms with failed requests have their number behind the figure."""
    lines = ["| scenario | figure | " + " | ".join(arms) + " | Orchard ÷ best peer |", "|---" * (len(arms) + 3) + "|"]
    for row in of_rows:
        cells = [_cell(row, arm) for arm in arms]
        ratio = "–" if math.isnan(row.ratio) else f"{row.ratio:.2f}"
        lines.append(f"| {row.scenario} | {row.figure} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def _cell(row: Row, arm: str) -> str:
    spread, num_errors = row.spreads.get(arm), row.num_errors.get(arm, 0)
    failed = f" ({num_errors} failed)" if num_errors else ""
    return ("–" if spread is None or math.isnan(spread.median) else f"{spread:.0f}") + failed


def plot(of_rows: Sequence[Row], arms: Sequence[str], title: str, path: Path) -> None:
    """Draw each row as bars relative to Orchard, with the spread, and write a PNG."""
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]  # uv run --with matplotlib

    figure, axes = pyplot.subplots(figsize=(11, 0.5 * len(of_rows) + 1.5))
    height = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        places, lengths, errors = [], [], [[], []]
        for y, row in enumerate(of_rows):
            own, spread = row.spreads["Orchard"].median, row.spreads.get(arm)
            if spread is None or math.isnan(spread.median):
                continue
            places.append(y + (i - (len(arms) - 1) / 2) * height)
            lengths.append(spread.median / own)
            errors[0].append((spread.median - spread.low) / own)
            errors[1].append((spread.high - spread.median) / own)
        axes.barh(places, lengths, height, xerr=errors, label=arm, error_kw={"linewidth": 0.7})
    axes.set_yticks(range(len(of_rows)), [f"{row.scenario}: {row.figure}" for row in of_rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.7)
    axes.set_xlabel("relative to Orchard: tokens/s, longer is better; ms, shorter is better")
    axes.set_title(title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
