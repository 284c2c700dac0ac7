"""The metrics of the ingress, and of the planners and the scorer on its node. They exist in the text format only."""

from collections.abc import Iterable
from dataclasses import replace

from deployments.http.figures import KeyUsage
from deployments.metrics.metric import Metric, Sample
from deployments.metrics.node_figures import IngressFigures, NodeFigures
from deployments.metrics.reading import ingress_samples, ingress_value, scorer_value


def _responses(ingress: IngressFigures) -> Iterable[Sample]:
    return [((api, str(status)), num) for (api, status), num in ingress.http.responses.items()]


def _errors(ingress: IngressFigures) -> Iterable[Sample]:
    return [((str(status), code), num) for (status, code), num in ingress.http.errors.items()]


def _refusals(ingress: IngressFigures) -> Iterable[Sample]:
    return [((limit,), num) for limit, num in ingress.http.refusals.items()]


def _answers(ingress: IngressFigures) -> Iterable[Sample]:
    return [((name,), usage.num_answers) for name, usage in ingress.http.usage.items()]


def _tokens(ingress: IngressFigures) -> Iterable[Sample]:
    for name, usage in ingress.http.usage.items():
        for kind, num in _kinds(usage).items():
            yield (name, kind), num


def _kinds(usage: KeyUsage) -> dict[str, int]:
    return {
        "prompt": usage.num_prompt_tokens,
        "cached": usage.num_cached_tokens,
        "completion": usage.num_completion_tokens,
    }


def _sparse_plans(node: NodeFigures) -> Iterable[Sample]:
    return [((route,), plans.num_sparse) for route, plans in node.sparse_plans.items()]


def _replanned(node: NodeFigures) -> Iterable[Sample]:
    return [((route,), plans.num_replanned) for route, plans in node.sparse_plans.items()]


def _dense(node: NodeFigures) -> Iterable[Sample]:
    for route, plans in node.sparse_plans.items():
        for reason, num in plans.dense.items():
            yield (route, reason), num


def _of_node(*metrics: Metric) -> tuple[Metric, ...]:
    """Return the metrics as those that a node has once, however many engines it has."""
    return tuple(replace(metric, is_of_engine=False) for metric in metrics)


HTTP_METRICS = _of_node(
    Metric(
        "orchard:http_responses",
        "counter",
        "",
        "HTTP responses by API and status; a stream has the status with which it began. A scrape is not counted.",
        ingress_samples(_responses),
        ("api", "status"),
    ),
    Metric(
        "orchard:http_errors",
        "counter",
        "",
        "Errors by status and code, or type without a code, in responses and in streams that had begun.",
        ingress_samples(_errors),
        ("status", "code"),
    ),
    Metric(
        "orchard:refusals",
        "counter",
        "",
        "Requests that exceeded a limit, by its name, such as `max_queue` or `max_tokens_per_minute`.",
        ingress_samples(_refusals),
        ("limit",),
    ),
    Metric(
        "orchard:key_answers",
        "counter",
        "",
        "Complete answers by name of the API key: `none` without keys, `all` where the names are hidden.",
        ingress_samples(_answers),
        ("key",),
    ),
    Metric(
        "orchard:key_tokens",
        "counter",
        "tokens",
        "Tokens of the usage in these answers: `prompt`, of which `cached`, and `completion`.",
        ingress_samples(_tokens),
        ("key", "kind"),
    ),
    Metric(
        "orchard:in_flight_choices",
        "gauge",
        "",
        "Choices in progress at this ingress.",
        ingress_value(lambda ingress: ingress.num_in_flight),
    ),
    Metric(
        "orchard:ingress_draining",
        "gauge",
        "",
        "1 while the ingress shuts down and refuses new requests.",
        ingress_value(lambda ingress: ingress.is_draining),
    ),
)

PLANNER_METRICS = _of_node(
    Metric(
        "orchard:sparse_plans",
        "counter",
        "",
        "Prompts with a sparse plan, by planner: `text` or `media`.",
        _sparse_plans,
        ("route",),
    ),
    Metric(
        "orchard:sparse_replans",
        "counter",
        "",
        "Prompts that were scored a second time because the cached prefix had changed.",
        _replanned,
        ("route",),
    ),
    Metric(
        "orchard:dense_prompts",
        "counter",
        "",
        "Prompts without a sparse plan although one was wanted, by kind of the reason, such as `cached` or `deadline`.",
        _dense,
        ("route", "reason"),
    ),
)

SCORER_METRICS = _of_node(
    Metric(
        "orchard:scorer_ready",
        "gauge",
        "",
        "1 if the draft model can score prompts.",
        scorer_value(lambda scorer: scorer.state == "ready"),
    ),
    Metric(
        "orchard:scorer_prompts",
        "gauge",
        "",
        "Prompts that are being scored or queued for it.",
        scorer_value(lambda scorer: scorer.num_running + scorer.num_waiting),
    ),
    Metric(
        "orchard:scored_prompts",
        "counter",
        "",
        "Scored prompts.",
        scorer_value(lambda scorer: scorer.num_scored),
    ),
    Metric(
        "orchard:scored_tokens",
        "counter",
        "tokens",
        "Tokens that the draft model read.",
        scorer_value(lambda scorer: scorer.num_scored_tokens),
    ),
    Metric(
        "orchard:scorer_refusals",
        "counter",
        "",
        "Prompts that the scorer refused: queue full, prompt too long, or not possible in time.",
        scorer_value(lambda scorer: scorer.num_refused),
    ),
    Metric(
        "orchard:scorer_failures",
        "counter",
        "",
        "Prompts whose scoring failed with an error.",
        scorer_value(lambda scorer: scorer.num_failed),
    ),
)

INGRESS_METRICS = (*HTTP_METRICS, *PLANNER_METRICS, *SCORER_METRICS)
