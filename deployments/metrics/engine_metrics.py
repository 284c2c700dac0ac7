"""The engine's metrics for which vLLM has no name."""

from collections.abc import Iterable, Mapping

from deployments.metrics.metric import Metric, Sample
from deployments.metrics.node_figures import NodeFigures
from deployments.metrics.prefix_cache_metrics import CACHE_METRICS
from deployments.metrics.reading import counts, engine_value, engine_values, of_requests, with_answer
from deployments.metrics.vllm_metrics import drafts, proposers
from engine.figures import EngineFigures
from engine.timeline import Obstacle, PreemptionReason

ACCOUNTS = ("weights", "row", "prefill", "transient", "prefix_cache", "image_cache", "unaccounted", "free")
"""Accounts of the memory budget, which add up to its limit."""

DEVICE_MEMORY = {"active": "active_bytes", "peak": "peak_bytes", "pool": "mlx_cache_bytes"}
"""MLX's figures of the device memory by label."""


def _accounts(engine: EngineFigures) -> Mapping[str, float]:
    accounts = engine.status.admission
    return {name: accounts[f"{name}_bytes"] for name in ACCOUNTS} if accounts else {}


def _device_memory(engine: EngineFigures) -> Mapping[str, float]:
    memory = engine.status.memory
    return {label: memory[name] for label, name in DEVICE_MEMORY.items() if name in memory}


def _rows(engine: EngineFigures) -> Mapping[str, float]:
    return {"decoding": engine.num_decoding, "prefilling": engine.status.num_running - engine.num_decoding}


def _acceptance(node: NodeFigures) -> Iterable[Sample]:
    found = {} if node.engine is None else proposers(node.engine)
    for name, status in found.items():
        for depth, mean in enumerate(status["acceptance_by_depth"], 1):
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
        engine_values(lambda engine: counts(Obstacle, engine.requests.obstacles)),
        ("obstacle",),
    ),
    Metric(
        "orchard:preemptions",
        "counter",
        "",
        "Preemptions of ended choices: for the `growth` of a row, the `priority` of a request, or `fairness`.",
        engine_values(lambda engine: counts(PreemptionReason, engine.requests.preempted)),
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
