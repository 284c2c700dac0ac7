"""All metrics: well-formed names, bounded labels, and a text that Prometheus's own parser reads."""

import re
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.http.figures import HttpFigures, KeyUsage
from deployments.metrics.catalog import METRICS
from deployments.metrics.metric import Metric
from deployments.metrics.node_figures import IngressFigures, NodeFigures, SparsePlans
from deployments.metrics.text_format import text_of
from deployments.metrics.vllm_metrics import row_memory_share
from engine.core.request_figures import RequestFigures
from engine.core.spec_prefill.plan import ScorerStatus
from engine.figures import EngineFigures
from engine.histogram import Histogram
from engine.status import EngineStatus, FetchStatus

UNITS = {"bytes": "_bytes", "seconds": "_seconds"}
"""Part of a metric's name by unit."""

PROPOSERS = ("mtp", "draft_model", "prompt_lookup", "another")

ACCOUNTS = {
    f"{name}_bytes": 10
    for name in ("weights", "row", "prefill", "transient", "prefix_cache", "image_cache", "unaccounted", "free")
}
FILES = ("written", "read", "dropped", "torn", "missing", "orphans", "evicted", "errors")


def full_node(model: str = "demo", key: str = "team") -> NodeFigures:
    """Figures of which every metric has a sample."""
    proposer = {"num_rounds": 2, "num_drafted": 6, "num_accepted": 4, "num_watchdog_trips": 1}
    status = EngineStatus(
        state="ready",
        model="x",
        load_progress=1.0,
        expected_wait_s=0.5,
        speculation={name: {**proposer, "acceptance_by_depth": [0.5, None]} for name in PROPOSERS} | {"step_ms": {}},
        memory={"active_bytes": 1, "peak_bytes": 2, "mlx_cache_bytes": 3}
        | {"prefix_cache_bytes": 4, "prefix_cache_max_bytes": 5},
        admission=ACCOUNTS | {"limit_bytes": 80, "num_underestimates": 0},
    )
    disk = {name: 1 for name in ("num_files", "num_bytes", "max_bytes", "read_bytes", "read_us")}
    files = disk | {f"num_{name}": 1 for name in FILES}
    engine = EngineFigures(status=status, disk=files, fetch=FetchStatus(num_fetched=1))
    http = HttpFigures(usage={key: KeyUsage(1, 7, 5, 4)})
    http.responses["chat", 200] += 1
    http.failed(429, "overloaded", "max_queue")
    return NodeFigures(
        model=model,
        engine=engine,
        sparse_plans={"text": SparsePlans(num_sparse=1, dense={"cached": 2})},
        scorer=ScorerStatus(state="ready", draft_model="y"),
        ingress=IngressFigures(http=http),
    )


def test_names_are_unique_and_well_formed():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    shown = [name.replace(":", "_") for name in names]
    assert len(set(shown)) == len(shown), "Ray's names"
    for metric in METRICS:
        assert re.fullmatch(r"(vllm|orchard):[a-z][a-z0-9_]*", metric.name)
        assert not (metric.kind == "counter" and metric.name.endswith("_total")), metric.name
        assert all(re.fullmatch("[a-z][a-z_]*", label) for label in metric.labels)
        assert metric.help.endswith(".")
        assert UNITS.get(metric.unit, "") in metric.name


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_samples_fit_the_kind_and_the_labels(metric: Metric):
    samples = list(metric.read(full_node()))
    assert samples
    for values, value in samples:
        assert len(values) == len(metric.labels)
        assert isinstance(value, Histogram) == (metric.kind == "histogram")
    assert len({values for values, _ in samples}) == len(samples)
    assert not list(metric.read(NodeFigures(model="demo"))), "nothing is shown of replicas that do not answer"


def test_drafts_are_shown_of_each_proposer_that_the_engine_names():
    node = full_node()
    shown = {metric.name: list(metric.read(node)) for metric in METRICS if "proposer" in metric.labels}
    assert "orchard:draft_acceptance" in shown and len(shown) == 5
    assert all({labels[0] for labels, _ in samples} == set(PROPOSERS) for samples in shown.values())


def test_the_text_has_what_was_read():
    node = full_node(model='a "model"\\n', key='the "first" key')
    families = {family.name: family for family in text_string_to_metric_families(text_of(METRICS, node).decode())}
    assert set(families) == {metric.name for metric in METRICS}
    for metric in METRICS:
        family = families[metric.name]
        assert family.type == metric.kind
        assert all(sample.labels["model_name"] == node.model for sample in family.samples)
        assert all(("engine" in sample.labels) == metric.is_of_engine for sample in family.samples)
        if metric.kind == "histogram":
            continue
        found = {tuple(sample.labels[label] for label in metric.labels): sample.value for sample in family.samples}
        assert found == {values: value for values, value in metric.read(node)}


def test_histograms_are_cumulative():
    requests = RequestFigures()
    for value in (0.0005, 0.001, 0.3, 0.7, 5000):
        requests.first_token_s.observe(value)
    node = full_node()
    assert node.engine is not None
    text = text_of(METRICS, replace(node, engine=replace(node.engine, requests=requests))).decode()
    family = {one.name: one for one in text_string_to_metric_families(text)}["vllm:time_to_first_token_seconds"]
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert (buckets["0.001"], buckets["0.25"], buckets["0.5"], buckets["2560.0"], buckets["+Inf"]) == (2, 2, 3, 4, 5)
    values = {s.name.removeprefix(family.name): s.value for s in family.samples if "le" not in s.labels}
    assert values == {"_count": 5, "_sum": pytest.approx(5001.0015)}


@pytest.mark.parametrize(
    ("accounts", "share"),
    [
        ({"row_bytes": 30, "prefill_bytes": 0}, 0.5),
        ({"row_bytes": 0, "prefill_bytes": 0}, 0),
        ({"row_bytes": 60, "prefill_bytes": 10, "free_bytes": -40}, 1),
        ({"row_bytes": 0, "prefill_bytes": 0, "free_bytes": -40}, 1),
    ],
)
def test_memory_of_rows_is_a_share_of_all_that_rows_could_have(accounts: dict[str, int], share: float):
    status = EngineStatus(state="ready", model="x", load_progress=1.0, admission=ACCOUNTS | accounts)
    assert row_memory_share(EngineFigures(status=status)) == share


def test_a_node_with_two_engines_shows_each_series_once_and_the_machine_by_the_first():
    first, other = full_node(), replace(NodeFigures(model="demo", engine=full_node().engine), engine_number="1")
    lines = text_of(METRICS, first, [other]).decode().splitlines()
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert len([line for line in lines if line.startswith("# TYPE")]) == len(METRICS)
    ready = [line for line in series if line.startswith("orchard:engine_ready")]
    assert len(ready) == 2 and 'engine="0"' in ready[0] and 'engine="1"' in ready[1]
    machine = [line for line in series if line.startswith("orchard:machine_memory")]
    assert len(machine) == 2 and all('engine="0"' in line for line in machine)
