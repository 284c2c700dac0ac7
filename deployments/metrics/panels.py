"""The rows and panels of Orchard's dashboard."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from deployments.metrics.catalog import METRICS
from deployments.metrics.metric import Metric
from deployments.metrics.promql import INSTANCE, RANGE, Query, fraction, increase, quantile, rate, share, value

Style = Literal["line", "area", "stack", "bars", "total"]
"""`stack`: areas on each other. `bars`: events. `total`: one number for each series, over the time that is shown."""

PanelUnit = Literal["short", "bytes", "Bps", "percentunit", "s", "suffix: tok/s", "suffix: s/s", "reqps"]
"""Units of Grafana."""

GRAFANA_UNITS: dict[str, PanelUnit] = {"": "short", "bytes": "bytes", "ratio": "percentunit", "seconds": "s"}
"""Units of metrics as Grafana names them; others are plain numbers."""

TOKENS_PER_S: PanelUnit = "suffix: tok/s"


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    queries: tuple[Query, ...]
    unit: PanelUnit = "short"
    style: Style = "line"
    text: str = ""
    """Shown beside the title, before the meaning of each metric."""

    @property
    def description(self) -> str:
        """Meaning of the chart and its metrics."""
        metrics = dict.fromkeys(metric for query in self.queries for metric in query.metrics)
        lines = [f"`{metric.name}`: {metric.help}" for metric in metrics]
        return "\n\n".join(filter(None, (self.text, *lines)))


@dataclass(frozen=True)
class Row:
    """Charts under a heading."""

    title: str
    panels: tuple[Panel, ...]
    is_collapsed: bool = False


def _percentiles(title: str, name: str, legend: str | None = None) -> Panel:
    return Panel(title, tuple(quantile(name, percent, legend=legend) for percent in (50, 95)), "s")


USERS = Row(
    "Users",
    (
        _percentiles("Time to first token", "vllm:time_to_first_token_seconds"),
        Panel(
            "Time per token",
            (
                quantile("vllm:request_time_per_output_token_seconds", 50),
                quantile("vllm:request_time_per_output_token_seconds", 95),
                quantile("vllm:inter_token_latency_seconds", 95, legend="between two"),
            ),
            "s",
        ),
        Panel(
            "Tokens per second",
            (
                rate("vllm:generation_tokens", legend="generated"),
                rate("vllm:prompt_tokens", legend="prompt"),
                rate("vllm:prompt_tokens_cached", legend="of them cached"),
            ),
            TOKENS_PER_S,
        ),
        _percentiles("Time to the last token", "vllm:e2e_request_latency_seconds"),
        Panel("Choices that ended, by reason", (rate("vllm:request_success", "finished_reason"),), "reqps", "stack"),
        Panel("HTTP responses", (rate("orchard:http_responses", "api", "status"),), "reqps", "stack"),
        Panel("Refusals by limit", (increase("orchard:refusals", "limit"),), style="bars"),
        Panel("HTTP errors", (increase("orchard:http_errors", "status", "code"),), style="bars"),
    ),
)

ENGINE = Row(
    "Engine",
    (
        Panel(
            "Rows by state",
            (value("orchard:rows", "state"), value("orchard:max_rows", legend="most rows")),
            style="area",
        ),
        Panel(
            "Queue",
            (value("vllm:num_requests_waiting", legend="queued"), value("orchard:in_flight_choices", legend="open")),
            style="area",
            text="`queued` counts requests; `open` counts choices, from the parsing of a request to its last token.",
        ),
        Panel(
            "Time in the queue",
            (
                quantile("vllm:request_queue_time_seconds", 50),
                quantile("vllm:request_queue_time_seconds", 95),
                value("orchard:expected_queue_time_seconds", INSTANCE, legend="expected now"),
            ),
            "s",
        ),
        Panel(
            "Waits as predicted and as they came out",
            (
                rate("orchard:predicted_queue_seconds", legend="predicted"),
                rate("orchard:measured_queue_seconds", legend="measured"),
            ),
            "suffix: s/s",
            text="Equal curves mean that the predicted waits, which clients are told in Retry-After, are right.",
        ),
        Panel(
            "Why choices waited, and rows were preempted",
            (
                increase("orchard:admission_obstacles", "obstacle", legend="waited for"),
                increase("orchard:preemptions", "reason", legend="preempted for"),
                increase("orchard:queue_timeouts", legend="timed out"),
            ),
            style="bars",
        ),
        Panel(
            "Phases of a request",
            (
                quantile("vllm:request_prefill_time_seconds", 95, legend="prefill"),
                quantile("vllm:request_decode_time_seconds", 95, legend="decode"),
                quantile("orchard:grammar_time_seconds", 95, legend="grammar"),
            ),
            "s",
        ),
        Panel(
            "Memory by account",
            (value("orchard:memory_bytes", "account"),),
            "bytes",
            "stack",
            text="The sum is `orchard:memory_limit_bytes`.",
        ),
        Panel(
            "Memory of the device and the machine",
            (
                value("orchard:device_memory_bytes", "kind", legend="device"),
                value("orchard:machine_memory_available_bytes", legend="machine, available"),
            ),
            "bytes",
        ),
        Panel(
            "Prefix cache: prompts, and misses by reason",
            (
                increase("orchard:prefix_cache_prompts", "result", legend="prompts"),
                increase("orchard:prefix_cache_misses", "reason", legend="miss"),
            ),
            style="bars",
        ),
        Panel(
            "Prefix cache: share of prompt tokens",
            (share("vllm:prefix_cache_hits", "vllm:prefix_cache_queries", legend="cached"),),
            "percentunit",
        ),
        Panel(
            "Prefix cache: seconds of prefill saved per second",
            (rate("orchard:prefix_cache_saved_seconds", legend="saved"),),
            "suffix: s/s",
        ),
        Panel(
            "Prefix cache: memory and disk",
            (
                value("orchard:prefix_cache_bytes", legend="memory"),
                value("orchard:prefix_cache_max_bytes", legend="most memory"),
                value("orchard:disk_cache_bytes", legend="disk"),
            ),
            "bytes",
        ),
        Panel("Snapshots", (increase("orchard:snapshots", "event"),), style="bars"),
        Panel(
            "Snapshots from other nodes",
            (
                increase("orchard:fetched_snapshots", legend="fetched"),
                increase("orchard:served_snapshots", legend="served"),
                increase("orchard:fetch_failures", "reason", legend="not fetched"),
                increase("orchard:taken_over_snapshots", "purpose", legend="taken over"),
                increase("orchard:not_taken_over_snapshots", "reason", legend="not taken over"),
            ),
            style="bars",
        ),
        Panel(
            "Bytes to and from other nodes",
            (
                rate("orchard:fetched_bytes", legend="fetched"),
                rate("orchard:served_bytes", legend="served"),
                rate("orchard:taken_over_bytes", "purpose", legend="taken over"),
            ),
            "Bps",
        ),
        Panel("Draft tokens per second", (rate("orchard:draft_tokens", "proposer"),), TOKENS_PER_S),
        Panel(
            "Accepted share of drafts",
            (share("orchard:accepted_draft_tokens", "orchard:draft_tokens", "proposer"),),
            "percentunit",
        ),
        Panel(
            "Accepted share of drafts by depth",
            (value("orchard:draft_acceptance", "proposer", "depth", INSTANCE),),
            "percentunit",
        ),
        _percentiles("Stall of decoding rows", "orchard:decode_stall_seconds"),
        Panel(
            "Late work and failures",
            (
                increase("orchard:late_work", legend="late work"),
                increase("orchard:failed_bursts", legend="failed bursts"),
                increase("orchard:memory_underestimates", legend="memory underestimates"),
                increase("orchard:prefix_cache_integrity_errors", legend="cache integrity errors"),
                increase("orchard:draft_pauses", "proposer", legend="paused proposer"),
                increase("orchard:scorer_failures", legend="failed scorings"),
            ),
            style="bars",
        ),
        Panel(
            "Sparse prefill: prompts",
            (
                increase("orchard:sparse_prompts", legend="sparse"),
                increase("orchard:dense_prompts", "reason", legend="dense:"),
            ),
            style="bars",
        ),
        Panel(
            "Sparse prefill: tokens per second",
            (
                rate("orchard:sparse_skipped_tokens", legend="skipped"),
                rate("orchard:scored_tokens", legend="scored"),
            ),
            TOKENS_PER_S,
        ),
    ),
)

CLUSTER = Row(
    "Cluster, by node",
    (
        Panel("Ready engines", (value("orchard:engine_ready", INSTANCE),), style="area"),
        Panel("Loading", (value("orchard:load_progress", "engine", INSTANCE),), "percentunit"),
        Panel("Generated tokens per second", (rate("vllm:generation_tokens", INSTANCE),), TOKENS_PER_S, "stack"),
        Panel("Rows", (value("vllm:num_requests_running", INSTANCE),), style="stack"),
        Panel("Queued requests", (value("vllm:num_requests_waiting", INSTANCE),), style="stack"),
        Panel("Memory reserved for rows", (value("vllm:kv_cache_usage_perc", "engine", INSTANCE),), "percentunit"),
        Panel(
            "Available memory of the machine",
            (fraction("orchard:machine_memory_available_bytes", "orchard:machine_memory_bytes", INSTANCE),),
            "percentunit",
        ),
        Panel(
            "Time to first token",
            (quantile("vllm:time_to_first_token_seconds", 95, INSTANCE),),
            "s",
        ),
    ),
)

COST = Row(
    "Cost, by API key",
    (
        Panel(
            "Tokens",
            (increase("orchard:key_tokens", "key", "kind", within=RANGE),),
            style="total",
            text="In the time that the dashboard shows. The kind `cached` is part of `prompt`.",
        ),
        Panel("Answers", (increase("orchard:key_answers", "key", within=RANGE),), style="total"),
        Panel("Tokens per second", (rate("orchard:key_tokens", "key", "kind"),), TOKENS_PER_S),
        Panel("Answers per second", (rate("orchard:key_answers", "key"),), "reqps", "stack"),
    ),
)

CHOSEN = (USERS, ENGINE, CLUSTER, COST)


def rows() -> tuple[Row, ...]:
    """Return all rows: the chosen charts, and then one for each metric that is in none of them."""
    shown = {metric for row in CHOSEN for panel in row.panels for query in panel.queries for metric in query.metrics}
    others = tuple(_plain(metric) for metric in METRICS if metric not in shown)
    return (*CHOSEN, Row("All other metrics", others, is_collapsed=True))


def _plain(metric: Metric) -> Panel:
    """Return a chart of one metric by its labels."""
    name, unit = metric.name, GRAFANA_UNITS.get(metric.unit, "short")
    if metric.kind == "histogram":
        return Panel(name, tuple(_quantiles(name)), unit)
    if metric.kind == "gauge":
        return Panel(name, (value(name, *metric.labels, INSTANCE),), unit)
    return Panel(name, (increase(name, *metric.labels),), unit, "bars")


def _quantiles(name: str) -> Iterable[Query]:
    return (quantile(name, percent) for percent in (50, 95))
