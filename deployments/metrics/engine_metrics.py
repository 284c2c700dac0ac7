"""The engine's metrics for which vLLM has no name."""

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from deployments.metrics.metric import Metric, Sample
from deployments.metrics.node_figures import NodeFigures
from deployments.metrics.reading import Read, engine_value, engine_values, of_requests, with_answer
from deployments.metrics.vllm_metrics import PROPOSERS, drafts
from engine.cache_miss import CacheMissReason
from engine.figures import EngineFigures
from engine.snapshot_store.wire import FetchFailure, NotTaken, Purpose
from engine.timeline import Obstacle, PreemptionReason

ACCOUNTS = ("weights", "row", "prefill", "transient", "prefix_cache", "image_cache", "unaccounted", "free")
"""Accounts of the memory budget, which add up to its limit."""

DEVICE_MEMORY = {"active": "active_bytes", "peak": "peak_bytes", "pool": "mlx_cache_bytes"}
"""MLX's figures of the device memory by label."""

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


def _accounts(engine: EngineFigures) -> Mapping[str, float]:
    accounts = engine.status.admission
    return {name: accounts[f"{name}_bytes"] for name in ACCOUNTS} if accounts else {}


def _device_memory(engine: EngineFigures) -> Mapping[str, float]:
    memory = engine.status.memory
    return {label: memory[name] for label, name in DEVICE_MEMORY.items() if name in memory}


def _rows(engine: EngineFigures) -> Mapping[str, float]:
    return {"decoding": engine.num_decoding, "prefilling": engine.status.num_running - engine.num_decoding}


def _counts(reasons: object, found: Mapping[str, int]) -> Mapping[str, float]:
    """Return the counts of all values of a Literal, also of those that were never counted."""
    return {reason: found.get(reason, 0) for reason in get_args(reasons)}


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
    return lambda engine: {} if engine.fetch is None else _counts(Purpose, getattr(engine.fetch, name))


def _not_taken_over(engine: EngineFigures) -> Mapping[str, float]:
    return {} if engine.fetch is None else _counts(NotTaken, engine.fetch.not_taken_over)


def _fetch_failures(engine: EngineFigures) -> Mapping[str, float]:
    return {} if engine.fetch is None else _counts(FetchFailure, engine.fetch.failures)


def _acceptance(node: NodeFigures) -> Iterable[Sample]:
    speculation = {} if node.engine is None else node.engine.status.speculation
    for name in PROPOSERS:
        for depth, mean in enumerate(speculation.get(name, {}).get("acceptance_by_depth", ()), 1):
            if mean is not None:
                yield (name, str(depth)), mean


STATE_METRICS = (
    Metric(
        "orchard:engine_ready",
        "gauge",
        "",
        "1 if the engine accepts requests, 0 while it loads, drains, is short of memory or has failed.",
        engine_value(lambda engine: engine.status.state == "ready" and engine.status.unavailable is None),
    ),
    Metric(
        "orchard:load_progress",
        "gauge",
        "ratio",
        "Progress of what the engine does before it is ready, 0 to 1.",
        engine_value(lambda engine: engine.status.load_progress),
    ),
    Metric("orchard:rows", "gauge", "", "Rows by state: `decoding` or `prefilling`.", engine_values(_rows), ("state",)),
    Metric(
        "orchard:max_rows",
        "gauge",
        "",
        "The most rows at once (max_running).",
        engine_value(lambda engine: engine.status.max_running),
    ),
    Metric(
        "orchard:steps", "counter", "", "Steps of the engine.", engine_value(lambda engine: engine.status.num_steps)
    ),
    Metric(
        "orchard:late_work",
        "counter",
        "",
        "Pieces of work that took much longer than predicted.",
        engine_value(lambda engine: engine.num_late),
    ),
    Metric(
        "orchard:bursts",
        "counter",
        "",
        "Forwards that computed chunks of several prompts.",
        engine_value(lambda engine: engine.status.num_bursts),
    ),
    Metric(
        "orchard:failed_bursts",
        "counter",
        "",
        "Such forwards that failed; each prompt was then computed alone.",
        engine_value(lambda engine: engine.status.num_failed_bursts),
    ),
)

MEMORY_METRICS = (
    Metric(
        "orchard:memory_bytes",
        "gauge",
        "bytes",
        "The engine's memory by account of its budget; together they are the limit.",
        engine_values(_accounts),
        ("account",),
    ),
    Metric(
        "orchard:memory_limit_bytes",
        "gauge",
        "bytes",
        "Memory that the engine may use.",
        engine_value(lambda engine: engine.status.admission.get("limit_bytes")),
    ),
    Metric(
        "orchard:memory_underestimates",
        "counter",
        "",
        "Times that rows took more memory than was reserved for them.",
        engine_value(lambda engine: engine.status.admission.get("num_underestimates")),
    ),
    Metric(
        "orchard:device_memory_bytes",
        "gauge",
        "bytes",
        "Memory of MLX in the engine's process: `active`, the `peak` of that, and the `pool` of freed buffers.",
        engine_values(_device_memory),
        ("kind",),
    ),
    Metric(
        "orchard:machine_memory_bytes",
        "gauge",
        "bytes",
        "Memory of the machine.",
        engine_value(lambda engine: engine.total_bytes),
        is_of_machine=True,
    ),
    Metric(
        "orchard:machine_memory_available_bytes",
        "gauge",
        "bytes",
        "Memory of the machine that processes can still take.",
        engine_value(lambda engine: engine.available_bytes),
        is_of_machine=True,
    ),
)

QUEUE_METRICS = (
    Metric(
        "orchard:expected_queue_time_seconds",
        "gauge",
        "seconds",
        "Predicted wait in the queue of a request that arrives now; absent while it is unknown.",
        engine_value(lambda engine: engine.status.expected_wait_s),
    ),
    Metric(
        "orchard:predicted_queue_seconds",
        "counter",
        "seconds",
        "Sum of the waits in the queue that were predicted when the choices were queued.",
        of_requests(lambda requests: requests.expected_s),
    ),
    Metric(
        "orchard:measured_queue_seconds",
        "counter",
        "seconds",
        "Sum of the waits of the same choices as they came out.",
        of_requests(lambda requests: requests.waited_s),
    ),
    Metric(
        "orchard:admission_obstacles",
        "counter",
        "",
        "Choices that had to wait, by the reason: max_running `rows` ran, `memory` was taken, `prompts` filled steps.",
        engine_values(lambda engine: _counts(Obstacle, engine.requests.obstacles)),
        ("obstacle",),
    ),
    Metric(
        "orchard:preemptions",
        "counter",
        "",
        "Preemptions of ended choices: for the `growth` of a row, the `priority` of a request, or `fairness`.",
        engine_values(lambda engine: _counts(PreemptionReason, engine.requests.preempted)),
        ("reason",),
    ),
    Metric(
        "orchard:queue_timeouts",
        "counter",
        "",
        "Choices that waited in the queue for longer than queue_timeout_s.",
        engine_value(lambda engine: engine.status.num_expired),
    ),
    Metric(
        "orchard:moved_choices",
        "counter",
        "",
        "Choices that this engine gave to others because it was drained or stopped.",
        engine_value(lambda engine: engine.status.num_moved),
    ),
    Metric(
        "orchard:grammar_time_seconds",
        "histogram",
        "seconds",
        "From the arrival of a request with a grammar in the engine to its queue; the grammar is compiled meanwhile.",
        of_requests(lambda requests: requests.compile_s),
        of_choice=lambda choice: choice.grammar_s,
    ),
    Metric(
        "orchard:decode_stall_seconds",
        "histogram",
        "seconds",
        "Per choice: time between its decode steps in which prompts of others were computed.",
        of_requests(lambda requests: requests.stalled_s),
        of_choice=with_answer(lambda choice: choice.stalled_s),
    ),
)

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
        engine_values(lambda engine: _counts(CacheMissReason, engine.cache.misses)),
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

DRAFT_METRICS = (
    Metric(
        "orchard:draft_steps",
        "counter",
        "",
        "Decode steps with drafts, by proposer.",
        engine_values(lambda engine: drafts(engine, "num_rounds")),
        ("proposer",),
    ),
    Metric(
        "orchard:draft_tokens",
        "counter",
        "tokens",
        "Draft tokens that were verified, by proposer.",
        engine_values(lambda engine: drafts(engine, "num_drafted")),
        ("proposer",),
    ),
    Metric(
        "orchard:accepted_draft_tokens",
        "counter",
        "tokens",
        "Draft tokens that were accepted, by proposer.",
        engine_values(lambda engine: drafts(engine, "num_accepted")),
        ("proposer",),
    ),
    Metric(
        "orchard:draft_acceptance",
        "gauge",
        "ratio",
        "Recent share of accepted drafts by proposer and depth, 1 is the first draft; absent before any.",
        _acceptance,
        ("proposer", "depth"),
    ),
    Metric(
        "orchard:draft_pauses",
        "counter",
        "",
        "Times that a proposer was paused because few of its drafts were accepted.",
        engine_values(lambda engine: drafts(engine, "num_watchdog_trips")),
        ("proposer",),
    ),
)

SPARSE_METRICS = (
    Metric(
        "orchard:sparse_prompts",
        "counter",
        "",
        "Rows whose prompts were prefilled by a sparse plan.",
        engine_value(lambda engine: engine.status.num_sparse),
    ),
    Metric(
        "orchard:sparse_skipped_tokens",
        "counter",
        "tokens",
        "Prompt tokens that sparse plans skipped.",
        engine_value(lambda engine: engine.status.num_skipped_tokens),
    ),
)

ENGINE_METRICS = (
    *STATE_METRICS,
    *MEMORY_METRICS,
    *QUEUE_METRICS,
    *CACHE_METRICS,
    *DRAFT_METRICS,
    *SPARSE_METRICS,
)
