"""The metrics with names of vLLM 0.33: those whose meaning is the same here, with its types, labels and buckets.

Choices of a request count one by one, as in vLLM; prompts of several choices count once, where vLLM counts one per
choice. Histograms of requests are of complete answers, without aborted ones. These names of vLLM would mean something
else and are left out:

| name | why |
|---|---|
| `cache_config_info`, `kv_block_*` | there are no blocks |
| `prompt_tokens_by_source`, `prompt_tokens_cached_by_source` | tokens that a sparse plan skips have no source |
| `external_prefix_cache_*`, `num_requests_kv_fetch_by_stage` | snapshots on disk belong to the prefix cache |
| `num_requests_waiting_by_reason`, `num_requests_swapped` | other states: see `orchard:admission_obstacles` |
| `spec_decode_num_drafts`, `spec_decode_num_accepted_tokens_per_pos` | steps are counted, not rows in a step |
| `request_max_num_generation_tokens` | the longest answer of a request's choices, which end separately here |
| `admission_rejections` | other limits: see `orchard:refusals` |
| `mm_cache_*`, `lora_requests_info`, `engine_sleep_state`, `corrupted_requests` | there is no such thing |
"""

from collections.abc import Mapping
from typing import Any

from deployments.metrics.metric import Metric
from deployments.metrics.reading import OfChoice, engine_value, engine_values, of_requests, with_answer
from engine.figures import EngineFigures
from engine.protocol import FinishReason
from engine.timeline import Decoded, Prefilled, Queued

FINISHED_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


def row_memory_share(engine: EngineFigures) -> float | None:
    """Return the fraction of the memory for rows that is reserved for them, from 0 to 1; None while it is unknown.

    What the caches hold is free for rows, as it is evicted for them.
    """
    accounts = engine.status.admission
    if not accounts:
        return None
    reserved = accounts["row_bytes"] + accounts["prefill_bytes"]
    evictable = accounts["prefix_cache_bytes"] + accounts["image_cache_bytes"]
    available = max(0, reserved + evictable + accounts["free_bytes"])
    return min(1.0, reserved / available) if available else 1.0


def proposers(engine: EngineFigures) -> dict[str, Mapping[str, Any]]:
    """Return ProposerRecord.status by proposer, of all that the engine has."""
    figures = engine.status.speculation
    return {name: one for name, one in figures.items() if isinstance(one, Mapping) and "acceptance_by_depth" in one}


def drafts(engine: EngineFigures, figure: str) -> dict[str, int]:
    """Return a figure of ProposerRecord.status by proposer."""
    return {name: status[figure] for name, status in proposers(engine).items()}


def _queried_tokens(engine: EngineFigures) -> int:
    has_cache = engine.status.memory.get("prefix_cache_max_bytes", 0) > 0
    return engine.requests.num_prompt_tokens if has_cache else 0


def _finished(engine: EngineFigures) -> Mapping[str, float]:
    return {reason.value: engine.requests.finished.get(reason, 0) for reason in FINISHED_REASONS}


def _histogram(name: str, field: str, help: str, of_choice: OfChoice | None = None, is_time: bool = True) -> Metric:
    """Make the metric of a histogram in RequestFigures."""
    return Metric(
        f"vllm:{name}",
        "histogram",
        "seconds" if is_time else "",
        help,
        of_requests(lambda requests: getattr(requests, field)),
        of_choice=None if of_choice is None else with_answer(of_choice),
    )


VLLM_METRICS = (
    Metric(
        "vllm:num_requests_running",
        "gauge",
        "",
        "Rows that decode or whose prompt is in progress.",
        engine_value(lambda engine: engine.status.num_running),
    ),
    Metric(
        "vllm:num_requests_waiting",
        "gauge",
        "",
        "Requests in the engine's queue, preempted ones included.",
        engine_value(lambda engine: engine.status.num_waiting),
    ),
    Metric(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "ratio",
        "Fraction of the memory for rows that is reserved, 0 to 1; what can be evicted counts as free.",
        engine_value(row_memory_share),
    ),
    Metric(
        "vllm:prompt_tokens",
        "counter",
        "tokens",
        "Tokens of the prompts that have their first token, cached ones included.",
        of_requests(lambda requests: requests.num_prompt_tokens),
    ),
    Metric(
        "vllm:prompt_tokens_cached",
        "counter",
        "tokens",
        "Those of them that came from the prefix cache.",
        of_requests(lambda requests: requests.num_cached_tokens),
    ),
    Metric(
        "vllm:generation_tokens",
        "counter",
        "tokens",
        "Generated tokens.",
        engine_value(lambda engine: engine.status.num_output_tokens),
    ),
    Metric(
        "vllm:prefix_cache_queries",
        "counter",
        "tokens",
        "Tokens of prompts for which the prefix cache was searched; 0 if it is off.",
        engine_value(_queried_tokens),
    ),
    Metric(
        "vllm:prefix_cache_hits",
        "counter",
        "tokens",
        "Those of them that were cached.",
        of_requests(lambda requests: requests.num_cached_tokens),
    ),
    Metric(
        "vllm:num_preemptions",
        "counter",
        "",
        "Preempted rows, once for each time.",
        engine_value(lambda engine: engine.status.num_preempted),
    ),
    Metric(
        "vllm:request_success",
        "counter",
        "",
        "Choices that have ended, by the reason: `stop`, `length`, `abort` or `error`.",
        engine_values(_finished),
        ("finished_reason",),
    ),
    Metric(
        "vllm:spec_decode_num_draft_tokens",
        "counter",
        "tokens",
        "Draft tokens that were verified.",
        engine_value(lambda engine: sum(drafts(engine, "num_drafted").values())),
    ),
    Metric(
        "vllm:spec_decode_num_accepted_tokens",
        "counter",
        "tokens",
        "Draft tokens that were accepted.",
        engine_value(lambda engine: sum(drafts(engine, "num_accepted").values())),
    ),
    _histogram(
        "time_to_first_token_seconds",
        "first_token_s",
        "From the arrival of the request to its first token.",
        lambda choice: choice.wait_s,
    ),
    _histogram("inter_token_latency_seconds", "between_tokens_s", "Between two publications of tokens of a choice."),
    _histogram(
        "request_time_per_output_token_seconds",
        "per_token_s",
        "Per choice: the time after its first token, divided by its other tokens.",
        lambda choice: choice.per_token_s,
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "total_s",
        "From the arrival of the request to the end of the choice in the engine.",
        lambda choice: choice.total_s,
    ),
    _histogram(
        "request_queue_time_seconds",
        "queue_s",
        "In the engine's queue, also after preemptions.",
        lambda choice: choice.seconds_in(Queued),
    ),
    _histogram(
        "request_prefill_time_seconds",
        "prefill_s",
        "From the admission to the first token.",
        lambda choice: choice.seconds_in(Prefilled),
    ),
    _histogram(
        "request_decode_time_seconds",
        "decode_s",
        "From the first token to the last.",
        lambda choice: choice.seconds_in(Decoded),
    ),
    _histogram(
        "request_inference_time_seconds",
        "inference_s",
        "From the admission to the last token.",
        lambda choice: choice.seconds_in(Prefilled, Decoded),
    ),
    _histogram(
        "request_prompt_tokens",
        "prompt_tokens",
        "Tokens of the prompt.",
        lambda choice: choice.num_prompt_tokens,
        is_time=False,
    ),
    _histogram(
        "request_generation_tokens",
        "output_tokens",
        "Generated tokens of a choice.",
        lambda choice: choice.num_tokens,
        is_time=False,
    ),
    _histogram(
        "request_prefill_kv_computed_tokens",
        "computed_tokens",
        "Tokens of the prompt that were computed, without cached and skipped ones.",
        lambda choice: choice.num_computed,
        is_time=False,
    ),
    _histogram(
        "request_params_max_tokens",
        "max_output_tokens",
        "Most tokens that a choice may have, limited by the context.",
        is_time=False,
    ),
    _histogram("request_params_n", "choices", "Choices of a request.", is_time=False),
    _histogram(
        "request_num_preemptions",
        "preemptions",
        "Preemptions of a choice.",
        lambda choice: choice.num_preemptions,
        is_time=False,
    ),
    _histogram("iteration_tokens_total", "step_tokens", "Tokens per step of the engine.", is_time=False),
)
