"""The engine's metrics of the prefix cache: in memory, on disk, and between nodes."""

from collections.abc import Callable, Mapping

from deployments.metrics.metric import Metric
from deployments.metrics.reading import Read, counts, engine_value, engine_values, of_requests
from engine.cache_miss import CacheMissReason
from engine.figures import EngineFigures
from engine.snapshot_store.wire import FetchFailure, NotTaken, Purpose

SNAPSHOT_EVENTS = {
    "stored": "num_stored",
    "evicted": "num_evicted",
    "rejected": "num_rejected",
    "outvalued": "num_outvalued",
    "unusable": "num_unusable",
}
"""Counters of snapshots by label."""

FILE_EVENTS = ("written", "read", "dropped", "torn", "missing", "orphans", "evicted", "errors")
"""Counters of the disk tier's files."""


def _snapshots(engine: EngineFigures) -> Mapping[str, float]:
    return {label: getattr(engine.cache, name) for label, name in SNAPSHOT_EVENTS.items()}


def _files(engine: EngineFigures) -> Mapping[str, float]:
    return {} if engine.disk is None else {event: engine.disk[f"num_{event}"] for event in FILE_EVENTS}


def _disk_value(name: str, scale: float = 1) -> Read:
    """Read a figure of the disk tier; no sample without one."""
    return engine_value(lambda engine: None if engine.disk is None else engine.disk[name] * scale)


def _fetch_value(name: str) -> Read:
    """Read a figure of the exchange with other nodes; no sample without one."""
    return engine_value(lambda engine: None if engine.fetch is None else getattr(engine.fetch, name))


def _taken_over(name: str) -> Callable[[EngineFigures], Mapping[str, float]]:
    """Return the reading of a figure by purpose, also of those that there was no snapshot for."""
    return lambda engine: {} if engine.fetch is None else counts(Purpose, getattr(engine.fetch, name))


def _not_taken_over(engine: EngineFigures) -> Mapping[str, float]:
    return {} if engine.fetch is None else counts(NotTaken, engine.fetch.not_taken_over)


def _fetch_failures(engine: EngineFigures) -> Mapping[str, float]:
    return {} if engine.fetch is None else counts(FetchFailure, engine.fetch.failures)


CACHE_METRICS = (
    Metric(
        "orchard:prefix_cache_prompts",
        "counter",
        "",
        "Prompts by the result of the search in the prefix cache: `hit` or `miss`.",
        engine_values(lambda engine: {"hit": engine.cache.num_hits, "miss": engine.cache.num_misses}),
        ("result",),
    ),
    Metric(
        "orchard:prefix_cache_misses",
        "counter",
        "",
        "Prompts without a cached prefix, by the reason.",
        engine_values(lambda engine: counts(CacheMissReason, engine.cache.misses)),
        ("reason",),
    ),
    Metric(
        "orchard:prefix_cache_saved_seconds",
        "counter",
        "seconds",
        "Predicted time of computing the tokens that came from the prefix cache, of ended choices.",
        of_requests(lambda requests: requests.saved_s),
    ),
    Metric(
        "orchard:prefix_cache_bytes",
        "gauge",
        "bytes",
        "Memory of the prefix cache's snapshots.",
        engine_value(lambda engine: engine.status.memory.get("prefix_cache_bytes")),
    ),
    Metric(
        "orchard:prefix_cache_max_bytes",
        "gauge",
        "bytes",
        "The most memory of snapshots; 0 if the prefix cache is off.",
        engine_value(lambda engine: engine.status.memory.get("prefix_cache_max_bytes")),
    ),
    Metric(
        "orchard:cached_snapshots",
        "gauge",
        "",
        "Snapshots of the prefix cache, in memory or on disk.",
        engine_value(lambda engine: engine.num_snapshots),
    ),
    Metric(
        "orchard:snapshots",
        "counter",
        "",
        "Snapshots that were `stored`, `evicted`, `rejected` (of them `outvalued`: by more useful ones) or `unusable`.",
        engine_values(_snapshots),
        ("event",),
    ),
    Metric(
        "orchard:prefix_cache_integrity_errors",
        "counter",
        "",
        "Failed checks of the prefix cache, each of which emptied it.",
        engine_value(lambda engine: engine.cache.num_integrity_errors),
    ),
    Metric(
        "orchard:disk_cache_bytes",
        "gauge",
        "bytes",
        "Snapshots on disk, of all models; absent without a disk tier, like all `orchard:disk_cache_*`.",
        _disk_value("num_bytes"),
    ),
    Metric(
        "orchard:disk_cache_max_bytes",
        "gauge",
        "bytes",
        "The most bytes of snapshots on disk.",
        _disk_value("max_bytes"),
    ),
    Metric(
        "orchard:disk_cache_files",
        "gauge",
        "",
        "Files of this model's snapshots.",
        _disk_value("num_files"),
    ),
    Metric(
        "orchard:disk_cache_read_bytes",
        "counter",
        "bytes",
        "Bytes that were read from the disk tier.",
        _disk_value("read_bytes"),
    ),
    Metric(
        "orchard:disk_cache_read_seconds",
        "counter",
        "seconds",
        "Time of reading them.",
        _disk_value("read_us", 1e-6),
    ),
    Metric(
        "orchard:disk_cache_events",
        "counter",
        "",
        "Files of the disk tier by event, such as `written`, `read`, `evicted` or `errors`.",
        engine_values(_files),
        ("event",),
    ),
    Metric(
        "orchard:fetched_snapshots",
        "counter",
        "",
        "Snapshots fetched from other nodes; absent where nodes share none, like all `orchard:fetch*` and "
        "`orchard:served_*`.",
        _fetch_value("num_fetched"),
    ),
    Metric(
        "orchard:fetched_bytes",
        "counter",
        "bytes",
        "Bytes that were fetched from other nodes, those of incomplete transfers included.",
        _fetch_value("fetched_bytes"),
    ),
    Metric(
        "orchard:fetch_seconds",
        "counter",
        "seconds",
        "Time of fetching them.",
        _fetch_value("fetched_s"),
    ),
    Metric(
        "orchard:fetch_failures",
        "counter",
        "",
        "Prefixes that other nodes have and that were computed, by reason, such as `timeout` or `damaged`; `slow`: "
        "computing was predicted to be faster.",
        engine_values(_fetch_failures),
        ("reason",),
    ),
    Metric(
        "orchard:taken_over_snapshots",
        "counter",
        "",
        "Those of the fetched snapshots that no prompt waited for, by purpose: `drain`, from a node that left; "
        "`warm_up`, what prompts share, after this node had joined; `replica`, copies (prefix_cache.replicate).",
        engine_values(_taken_over("taken_over")),
        ("purpose",),
    ),
    Metric(
        "orchard:taken_over_bytes",
        "counter",
        "bytes",
        "Their bytes, those of incomplete transfers included.",
        engine_values(_taken_over("taken_over_bytes")),
        ("purpose",),
    ),
    Metric(
        "orchard:not_taken_over_snapshots",
        "counter",
        "",
        "Snapshots that another node offered and that are not here, by reason, such as `room` (what is here is worth "
        "more), `deadline` or `cut`.",
        engine_values(_not_taken_over),
        ("reason",),
    ),
    Metric(
        "orchard:served_snapshots",
        "counter",
        "",
        "Snapshots that were sent to other nodes.",
        _fetch_value("num_served"),
    ),
    Metric(
        "orchard:served_bytes",
        "counter",
        "bytes",
        "Bytes that were sent to other nodes.",
        _fetch_value("served_bytes"),
    ),
)
