"""The table of the comparison with peers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.peers.figures import load, markdown, rows

pytestmark = pytest.mark.night("a tool of the developers, not of the server")


def figures(scenario: str, rate: float, first: float, errors: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "scenario": scenario,
        "errors": list(errors),
        "tokens/s": rate,
        "first token p50, ms": first,
        "first token last, ms": first,
    }


def test_rows_compare_medians_with_the_best_peer_that_answers_everything(tmp_path: Path) -> None:
    for arm, by_round in {
        "Orchard": [(30.0, 100.0), (10.0, 300.0), (20.0, 200.0)],
        "slow": [(10.0, 100.0)],
        "failing": [(90.0, 1.0)],
    }.items():
        for i, (rate, first) in enumerate(by_round):
            folder = tmp_path / arm / str(i)
            folder.mkdir(parents=True)
            errors = ("status 500",) if arm == "failing" else ()
            (folder / "figures.jsonl").write_text(json.dumps(figures("text, 1", rate, first, errors)) + "\n")
    rate, first = rows(load(tmp_path))
    assert (rate.spreads["Orchard"].median, rate.ratio, first.ratio) == (20.0, 2.0, 0.5)
    text = markdown([rate, first], ["Orchard", "slow", "failing", "absent"])
    assert "| text, 1 | tokens/s | 20 [10 30] | 10 [10 10] | 90 [90 90] (1 failed) | – | 2.00 |" in text


def test_a_row_without_a_peer_has_no_ratio(tmp_path: Path) -> None:
    folder = tmp_path / "Orchard" / "1"
    folder.mkdir(parents=True)
    (folder / "figures.jsonl").write_text(json.dumps(figures("tools, 4", 5.0, math.nan)))
    assert all(math.isnan(row.ratio) for row in rows(load(tmp_path)))
