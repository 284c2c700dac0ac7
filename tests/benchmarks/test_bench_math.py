import json
import math
from dataclasses import asdict

import pytest

from engine.config import EngineConfig
from engine.worker import blas
from tests.benchmarks.engine_bench import Arm, Stream, conditions, figures
from tests.benchmarks.measure import CpuTrace, Spread, percentile, table
from tests.benchmarks.publish_figures import engine_cost, latencies_ms
from tests.benchmarks.serve_bench import Workload, is_loopback, plan, summary
from tests.support.sse import Answer, Exchange, answer, events, response

pytestmark = pytest.mark.night("it tests a tool of the developers, not the server")

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def test_percentiles_lie_between_the_nearest_values():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2], 0) == 1 and percentile([1, 2], 100) == 2
    assert percentile([7], 99) == 7
    assert math.isnan(percentile([], 50))


def test_a_spread_is_median_and_range():
    assert f"{Spread.of([3.0, 1.0, 8.0]):.1f}" == "3.0 [1.0 8.0]"
    assert math.isnan(Spread.of([]).median)


def test_a_table_is_aligned():
    assert table(["a", "bcd"], [["100", "1"]]) == "  a  bcd\n100    1"


def test_a_chunked_body_is_the_same_however_the_reads_are_cut():
    wire = HEAD + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\ndata: 3\n\n") + b"0\r\n\r\n"
    for size in (1, 2, 7, len(wire)):
        reads = [(float(i), wire[i : i + size]) for i in range(0, len(wire), size)]
        status, body = response(reads)
        assert status == 200
        assert [data for _, data in events(body)] == [b"1", b"2", b"3"]


def test_an_event_has_the_time_of_the_read_that_completed_it():
    reads = [(1.0, HEAD + chunk(b"data: a\n\n")), (2.0, b"6\r\ndata: "), (3.0, b"\r\n3\r\nb\n\n\r\n")]
    assert events(response(reads)[1]) == [(1.0, b"a"), (3.0, b"b")]


def test_comments_are_no_events():
    assert events([(1.0, b": ping\n\ndata: a\r\n\r\n")]) == [(1.0, b"a")]


def test_an_answer_has_its_pieces_times_and_usage():
    first = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    texts = [b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text for text in (b"ab", b"c")]
    end = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    times = (1.0, 2.0, 2.5, 2.6, 2.7)
    reads = [(at, chunk(data)) for at, data in zip(times, [first, *texts, end, usage], strict=True)]
    result = answer(Exchange(due=0.5, sent=0.6, reads=[(0.9, HEAD), *reads]))
    assert result.error is None and result.finish_reason == "length"
    assert result.pieces == [(2.0, "ab"), (2.5, "c")]
    assert (result.ttft_s, result.gaps_s, result.tpot_s) == (1.5, [0.5], 0.25)
    assert (result.num_prompt_tokens, result.num_output_tokens) == (5, 3)


def test_refusals_error_events_and_broken_streams_are_read_as_errors():
    refused = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy"
    assert answer(Exchange(0, reads=[(1.0, refused)])).error == "HTTP 429: busy"
    failed = HEAD + chunk(b'data: {"error":{"message":"lost"}}\n\ndata: [DONE]\n\n')
    assert answer(Exchange(0, reads=[(1.0, failed)])).error == "lost"
    broken = HEAD + chunk(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
    assert answer(Exchange(0, reads=[(1.0, broken)])).error == "the stream broke off"
    assert answer(Exchange(0)).error == "no answer"


def workload(**changes) -> Workload:
    defaults = dict(
        rate=10.0,
        num_requests=200,
        duration_s=1000.0,
        arrivals="poisson",
        image_ratio=0.25,
        prompt_words=(8, 64),
        max_tokens=16,
        image_px=64,
        seed=1,
    )
    return Workload(**{**defaults, **changes})


def test_equal_workloads_are_equal_requests_at_equal_times():
    planned = plan(workload(), "m")
    assert planned == plan(workload(), "m") != plan(workload(seed=2), "m")
    assert len(planned) == 200
    assert planned[-1].at_s == pytest.approx(20, rel=0.3)
    assert sum(p.kind == "image" for p in planned) == pytest.approx(50, abs=20)


def test_a_workload_is_bounded_in_time_and_may_be_regular():
    planned = plan(workload(arrivals="fixed", duration_s=1.0), "m")
    assert [round(p.at_s, 6) for p in planned] == [i / 10 for i in range(11)]


def test_a_summary_counts_waits_from_the_due_time_and_leaves_failed_requests_out():
    good = answer_of(due=1.0, times=(2.0, 2.1, 2.3), num_output_tokens=3)
    bad = answer_of(due=1.5, times=(9.0,), num_output_tokens=0, error="lost")
    row = summary("text", [good, bad])
    assert (row["requests"], row["errors"], row["output_tokens"]) == (2, 1, 3)
    assert row["ttft_ms_p50"] == pytest.approx(1000)
    assert row["gap_ms_p50"] == pytest.approx(150)
    assert row["tpot_ms_p50"] == pytest.approx(150)
    assert row["tokens_per_s"] == pytest.approx(3 / 1.3)


def answer_of(due: float, times: tuple[float, ...], num_output_tokens: int, error: str | None = None) -> Answer:
    return Answer(due, due, [(at, "x") for at in times], 4, num_output_tokens, "stop", error)


def test_loopback_urls_are_recognised():
    assert all(is_loopback(f"http://{host}:8000/v1") for host in ("127.0.0.1", "localhost", "[::1]"))
    assert not any(is_loopback(f"http://{host}/v1") for host in ("example.com", "0.0.0.0", "10.0.0.1"))


def test_a_decode_rate_counts_only_while_all_rows_decode():
    rows = [
        Stream(0.0, [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)], cpu_s=[0.1, 0.7]),
        Stream(0.0, [(2.0, 1), (3.0, 2), (4.0, 1), (5.0, 1)], cpu_s=[0.2, 0.9]),
    ]
    result = figures(Arm(2, 64, 5), rows)
    assert result["tokens_per_s"] == [5 / 2.0]
    assert result["cpu_us_per_token"] == [pytest.approx(0.5 / 5 * 1e6)]
    assert result["ttft_ms"] == [1000.0, 2000.0]


def test_a_prefill_rate_is_the_prompt_over_the_wait():
    assert figures(Arm(1, 100, 1), [Stream(1.0, [(1.5, 1)])])["tokens_per_s"] == [200.0]


def test_the_conditions_of_a_report_are_plain_values():
    plain = json.loads(json.dumps(conditions(EngineConfig(), {"compiled": False})))
    assert plain["blas"] == asdict(blas.preload()) and plain["capabilities"] == {"compiled": False}
    assert EngineConfig.model_validate(plain["config"]) == EngineConfig()


def test_the_engine_is_charged_only_for_the_time_in_which_all_streams_run():
    trace = CpuTrace([])
    trace.samples = [(0.0, 0.0), (10.0, 1.0)]  # a tenth of a core
    emitted = {0: [1.0, 2.0, 3.0, 4.0, 5.0], 1: [2.0, 3.0, 4.0, 5.0, 6.0]}
    cost = engine_cost(trace, emitted, idle=0.01, step_us=10_000.0)
    assert cost["items"] == 6
    assert cost["gross_us"] == pytest.approx(0.3 / 6 * 1e6)
    assert cost["net_us"] == pytest.approx((0.3 - 0.03 - 0.03) / 6 * 1e6)


def test_latencies_are_per_token_and_a_missing_token_is_an_error():
    assert latencies_ms({7: [1.0, 2.0]}, {"7": [1.5, 2.25]}) == [500.0, 250.0]
    with pytest.raises(ValueError):
        latencies_ms({7: [1.0, 2.0]}, {"7": [1.5]})
