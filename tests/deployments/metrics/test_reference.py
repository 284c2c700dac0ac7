"""deployments/METRICS.md is what the catalog says."""

from pathlib import Path

import pytest

from deployments.metrics import reference as module
from deployments.metrics.catalog import METRICS
from deployments.metrics.reference import COMMAND, REFERENCE, main, reference


def test_the_reference_is_up_to_date():
    assert REFERENCE.read_text(encoding="utf-8") == reference(), f"run {COMMAND} --write"


def test_the_reference_has_each_metric_once():
    lines = [line for line in reference().splitlines() if line.startswith(("| `vllm:", "| `orchard:"))]
    assert [line.split("`")[1] for line in lines] == [metric.name for metric in METRICS]


def test_the_reference_is_printed_or_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    main([])
    assert capsys.readouterr().out == reference()
    monkeypatch.setattr(module, "REFERENCE", tmp_path / "METRICS.md")
    main(["--write"])
    assert (tmp_path / "METRICS.md").read_text(encoding="utf-8") == reference()
