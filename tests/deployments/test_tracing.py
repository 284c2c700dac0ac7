"""Traces reach a receiver of OTLP: one per request, with its phases as spans and the caller's trace as parent."""

import asyncio
import gzip
import itertools
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pydantic import ValidationError

from deployments import tracing
from deployments.args import AppArgs
from tests.deployments.demo_graph import DemoGraph

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver:
    """An OTLP receiver over HTTP, which keeps the spans."""

    def __init__(self) -> None:
        receiver, self.spans = self, list[Span]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        receiver.spans += scope.spans
                self.send_response(200)
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of(self, request_id: str) -> tuple[Span, list[Span]]:
        """Return the span of a request, and those in it; they arrive soon after its end."""
        deadline = time.monotonic() + 60
        while True:
            found = [one for one in self.spans if attributes(one).get("gen_ai.request.id") == request_id]
            if found:
                return found[0], [one for one in self.spans if one.parent_span_id == found[0].span_id]
            assert time.monotonic() < deadline, "no trace has arrived"
            time.sleep(0.1)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def graph(receiver: Receiver) -> Iterator[DemoGraph]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds after which spans are sent, instead of 5000
        graph = DemoGraph(tracing={"endpoint": receiver.endpoint})
    yield graph
    graph.close()


def test_a_request_is_a_trace_with_its_phases_inside(graph: DemoGraph, receiver: Receiver):
    async def test():
        answer, _ = await graph.ask("traced", "What is 12 + 30?", traceparent=f"00-{TRACE}-{PARENT}-01")
        return answer.json(), await graph.timeline("traced")

    answer, told = graph.run(test)
    parent, inside = receiver.of("traced")
    assert (parent.trace_id.hex(), parent.parent_span_id.hex()) == (TRACE, PARENT)
    assert parent.name == "chat demo" and parent.kind == Span.SPAN_KIND_SERVER
    assert [one.name for one in inside] == [one["name"] for one in told["phases"]]
    for one, phase in zip(inside, told["phases"], strict=True):
        assert (one.end_time_unix_nano - one.start_time_unix_nano) / 1e9 == pytest.approx(phase["seconds"], abs=1e-5)
    for before, after in itertools.pairwise(inside):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert inside[0].start_time_unix_nano == parent.start_time_unix_nano
    assert abs(inside[-1].end_time_unix_nano - parent.end_time_unix_nano) < 1e5
    found = attributes(parent)
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "orchard",
        "gen_ai.request.model": "demo",
        "gen_ai.response.id": answer["id"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.choice.count": 1,
        "http.response.status_code": 200,
    }.items() <= found.items()
    assert found["gen_ai.latency.e2e"] == pytest.approx(told["seconds"], abs=1e-5)
    assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(told["first_token_s"], abs=1e-5)
    assert "What is" not in str([attributes(one) for one in (parent, *inside)]), "no text of the prompt"


def test_a_refused_request_and_one_without_a_context_are_traces_too(graph: DemoGraph, receiver: Receiver):
    graph.run(lambda: graph.ask("refused", "Hi", temperature=9))
    parent, inside = receiver.of("refused")
    assert not parent.parent_span_id and attributes(parent)["http.response.status_code"] == 400
    assert attributes(parent)["error.type"] and [one.name for one in inside] == ["body", "send"]


def test_the_decision_of_the_caller_not_to_sample_holds(graph: DemoGraph, receiver: Receiver):
    graph.run(lambda: graph.ask("unsampled", "Hi", traceparent=f"00-{TRACE}-{PARENT}-00"))
    graph.run(lambda: graph.ask("sampled", "Hi"))
    receiver.of("sampled")
    assert not [one for one in receiver.spans if attributes(one).get("gen_ai.request.id") == "unsampled"]


def test_a_receiver_that_is_gone_delays_and_fails_no_request():
    graph = DemoGraph(tracing={"endpoint": "http://127.0.0.1:9/v1/traces"})

    async def test():
        for i in range(3):
            answer, _ = await graph.ask(f"r{i}", "Hi", max_tokens=1)
            assert answer.status_code == 200

    graph.run(test)
    began_s = time.monotonic()
    graph.run(lambda: asyncio.to_thread(graph.graph.replicas["ingress"]._tracing.close))
    assert time.monotonic() - began_s < 30
    graph.close()


def test_options_without_effect_are_errors(monkeypatch: pytest.MonkeyPatch):
    assert AppArgs.model_validate({"tracing": {"endpoint": "http://127.0.0.1:4318/v1/traces", "sampled_part": 0.1}})
    with pytest.raises(ValidationError, match=r"tracing\.sampled_part: has no effect, as tracing\.endpoint is null"):
        AppArgs.model_validate({"tracing": {"sampled_part": 0.1}})
    monkeypatch.setattr(tracing, "EXPORTER", "opentelemetry.exporter.missing")
    with pytest.raises(ValidationError, match=r"tracing\.endpoint: .* install orchard-mlx\[tracing\]"):
        AppArgs.model_validate({"tracing": {"endpoint": "http://127.0.0.1:4318/v1/traces"}})
