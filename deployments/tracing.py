"""Tracing: one OpenTelemetry trace per request, made from its timeline when it has ended and sent by OTLP over HTTP.

Names follow the conventions for generative AI, and vLLM's for what those leave out. There is no text of prompts or
answers in it. The packages of OpenTelemetry are imported only if tracing is on.
"""

import importlib.util
from typing import Any

from pydantic import Field

from deployments.http.dialects import DIALECTS
from deployments.http.timeline import RequestTimeline, sum_by_name
from deployments.http.timing import why
from engine.config import Frozen

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
SERVICE = "orchard"

TIMEOUT_S = 2
"""Longest attempt to send spans, retries included; spans that cannot be sent are dropped and logged."""


class TracingConfig(Frozen):
    """The section `tracing` of the arguments."""

    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="URL to which traces are sent, by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; null: "
        "no tracing. OTEL_EXPORTER_OTLP_HEADERS and its siblings hold as usual. Needs the extra `tracing`",
    )
    sampled_part: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="part of the requests that are traced; a request whose traceparent header has decided keeps that "
        "decision",
    )


def why_not() -> str | None:
    """Return why traces cannot be sent here; None if they can."""
    try:
        is_found = importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        is_found = False
    return (
        None
        if is_found
        else "the package opentelemetry-exporter-otlp-proto-http is missing: install orchard-mlx[tracing]"
    )


class Tracing:
    """Sends the traces of one ingress in the background; a receiver that does not answer delays no request.

    Args:
        config: Where to, and how many; `config.endpoint` is set.
        model: Name of the served model.
    """

    def __init__(self, config: TracingConfig, model: str):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(
            ParentBasedTraceIdRatio(config.sampled_part), Resource.create({"service.name": SERVICE})
        )  # not the global one, which is Serve's
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint, timeout=TIMEOUT_S))
        )
        self._tracer = self._provider.get_tracer(SERVICE)

    def send(self, timeline: RequestTimeline) -> None:
        """Hand the trace of a finished request to the exporter: a span of the request, and one per phase in it."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        began_ns = int(timeline.created * 1e9)
        operation = DIALECTS.of(timeline.path).traced_as.get(timeline.path, "chat")
        parent = self._tracer.start_span(
            f"{operation} {self._model}",
            self._propagator.extract(timeline.trace_context),
            SpanKind.SERVER,
            self._attributes(timeline, operation),
            start_time=began_ns,
        )
        if timeline.status >= 500:
            parent.set_status(StatusCode.ERROR, timeline.error)
        inside, at_ns = set_span_in_context(parent), began_ns
        for one in timeline.stretches():
            facts = {f"orchard.{name}": fact for name, fact in one.facts.items() if isinstance(fact, str | int | float)}
            span = self._tracer.start_span(one.name, inside, attributes=facts, start_time=at_ns)
            at_ns += int(one.seconds * 1e9)
            span.end(at_ns)
        parent.end(began_ns + int(timeline.seconds * 1e9))

    def close(self) -> None:
        """Send what is left, in about TIMEOUT_S."""
        self._provider.shutdown()

    def _attributes(self, timeline: RequestTimeline, operation: str) -> dict[str, Any]:
        usage, by_name = timeline.usage, sum_by_name(timeline.stretches())
        told: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": timeline.answer_id or None,
            "gen_ai.request.id": timeline.request_id,
            "gen_ai.usage.input_tokens": usage.get("num_prompt_tokens"),
            "gen_ai.usage.cache_read.input_tokens": usage.get("num_cached_tokens"),
            "gen_ai.usage.output_tokens": usage.get("num_tokens"),
            "gen_ai.latency.e2e": timeline.seconds,
            "gen_ai.latency.time_to_first_token": timeline.first_token_s,
            "gen_ai.latency.time_in_queue": by_name.get("queue"),
            "gen_ai.latency.time_in_model_prefill": by_name.get("prefill"),
            "gen_ai.latency.time_in_model_decode": by_name.get("decode"),
            "http.response.status_code": timeline.status,
            "url.path": timeline.path,
            "error.type": timeline.error or None,
            "orchard.outcome": timeline.outcome,
            "orchard.why": why(timeline),
        }
        told |= {f"gen_ai.request.{name}": value for name, value in timeline.asked.items()}
        return {name: value for name, value in told.items() if value is not None}
